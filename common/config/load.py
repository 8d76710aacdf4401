"""Reads settings from flags, the environment, a YAML file and the defaults. The first source that has a key wins.

A process whose role may change also has settings of its other role, in a file of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from common.config.fast_paths import FastPath
from common.config.settings import (
    ENV_PREFIX,
    NO_DRAFT,
    DecodeSettings,
    GatewaySettings,
    LogFormat,
    PrefillSettings,
    ProcessSettings,
    ServiceSettings,
)
from common.errors import ConfigError
from common.role import Role

SettingsT = TypeVar("SettingsT", bound=ProcessSettings)
AnyT = TypeVar("AnyT", bound=BaseSettings)

_HELP = {"-h", "--help"}

# Variables of the client, which may run in the same environment as the services.
_OTHER_VARIABLES = {"BATON_ADDRESS", "BATON_TOKEN_FILE"}
SETTINGS_OF: dict[Role, type[ServiceSettings]] = {Role.PREFILL: PrefillSettings, Role.DECODE: DecodeSettings}
FIXED = frozenset(
    {
        "attention",
        "config",
        "device",
        "disabled_fast_paths",
        "draft",
        "draft_topk",
        "dtype",
        "kv_dtype",
        "listen",
        "log_format",
        "log_level",
        "max_context_tokens",
        "metrics_listen",
        "metrics_token_file",
        "model",
        "num_threads",
        "other_role",
        "tensor_parallel",
        "tf32",
    }
)
"""The settings that are the same in both roles, because what they decide stays as it is when the role changes: the
loaded model, the addresses and the log.
"""


def load_settings(
    kind: type[SettingsT], argv: Sequence[str], *, program: str, without: Collection[str] = ()
) -> SettingsT:
    """Reads the settings from every source once. Raises ConfigError, naming each key or flag that is wrong or unknown.

    Variables in `without` are not read, because they are meant for another process of Baton. `--help` prints every
    setting and ends the process with status 0.
    """
    if not _HELP.isdisjoint(argv):
        print(help_text(kind, program))
        raise SystemExit(0)
    _check_environment()
    read = _sources(kind, list(argv), program, frozenset(name.lower() for name in without))
    try:
        values = read()
        return kind.model_construct(values.model_fields_set, **dict(values))  # an object that can be pickled
    except ValidationError as error:
        raise ConfigError("; ".join(map(_describe_error, error.errors()))) from error
    except SettingsError as error:
        raise ConfigError(str(error).removeprefix("error parsing CLI: ")) from error


def log_format_asked(argv: Sequence[str]) -> LogFormat:
    """Returns the log format that the settings ask for, before they are validated; "json" if it cannot be read.

    Errors in the settings are logged in this format.
    """
    flags = [flag for flag in argv if flag not in _HELP]  # the parser would print help for these two settings
    try:
        return _sources(_LogSettings, flags, "", frozenset(), ignores_others=True)().log_format
    except (ValidationError, SettingsError, ConfigError):
        return "json"


class _LogSettings(BaseSettings):
    model_config = SettingsConfigDict(extra="ignore", env_prefix=ENV_PREFIX, env_ignore_empty=True)

    config: Path | None = None
    log_format: LogFormat = "json"


def help_text(kind: type[ProcessSettings], program: str) -> str:
    """Returns the text of `--help`: every setting with its description and default."""
    lines = [
        f"usage: python -m {program} [--SETTING VALUE ...]",
        "",
        f"example: python -m {program} {kind.example}",
        "",
        f"Every setting is also an environment variable ({ENV_PREFIX}LISTEN) and a key of the YAML file (listen)",
        "that --config names; a flag wins over the environment, and that over the file.",
        "",
    ]
    for name, field in kind.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        is_switch = field.annotation is bool
        lines.append(f"{flag}, --no-{flag[2:]}" if is_switch else f"{flag} {_placeholder(name, field)}")
        lines.append(f"    {field.description}{_default_words(field.default)}")
    if "disabled_fast_paths" in kind.model_fields:
        lines += ["", "fast paths:", *(f"{path}\n    {path.meaning}" for path in FastPath)]
    return "\n".join(lines)


def _placeholder(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "|".join(get_args(field.annotation))
    return name.rpartition("_")[2].upper()


def _default_words(default: object) -> str:
    match default:
        case True | False:
            return f" (default: {'on' if default else 'off'})"
        case None | "" | ():
            return ""
        case tuple():
            return f" (default: {','.join(map(str, default))})"
        case _:
            return f" (default: {default})"


def _sources(
    kind: type[AnyT], argv: list[str], program: str, without: frozenset[str], *, ignores_others: bool = False
) -> Callable[[], AnyT]:
    """Returns a class of settings that reads flags, then the environment, then the YAML file that either names.

    If `ignores_others`, unknown flags are ignored instead of refused.
    """

    class FromSources(kind):  # type: ignore[valid-type, misc]
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], env_settings: PydanticBaseSettingsSource, **_: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            flags: CliSettingsSource[Any] = CliSettingsSource(
                settings_cls,
                cli_prog_name=program,
                cli_parse_args=argv,
                cli_exit_on_error=False,
                cli_kebab_case=True,
                cli_implicit_flags=True,
                cli_hide_none_type=True,
                cli_avoid_json=True,
                cli_ignore_unknown_args=ignores_others,
            )
            assert isinstance(env_settings, EnvSettingsSource)
            env_settings.env_vars = {
                name: value for name, value in env_settings.env_vars.items() if name.lower() not in without
            }
            return flags, env_settings, _YamlFile(settings_cls)

    FromSources.__name__, FromSources.__doc__ = kind.__name__, kind.__doc__
    return FromSources


class _YamlFile(PydanticBaseSettingsSource):
    """The settings source that reads the YAML file which `config` names in an earlier source."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("values are read all at once")

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        values = _read_yaml("config", Path(path))
        if "config" in values:
            raise ConfigError(f"config: {path}: a file cannot name another")
        return values


class _Texts(yaml.BaseLoader):
    """Reads scalars as texts, so that a value means what it means as a flag and in the environment, and null as None.

    YAML's own rules make 8 of 010, 90 of 1:30, and a bool, which passes for 1, of true.
    """


_NULL = "tag:yaml.org,2002:null"
_Texts.add_implicit_resolver(_NULL, re.compile("(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Texts.add_constructor(_NULL, lambda loader, node: None)


def _read_yaml(setting: str, path: Path) -> dict[str, Any]:
    """Returns the keys and values in the YAML file that `setting` names. Raises ConfigError, which names both."""
    try:
        values = yaml.load(path.read_text(), _Texts)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{setting}: {path}: {why}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{setting}: {path}: is not a mapping of keys to values")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _describe_error(error: Any) -> str:
    """Returns what one of a ValidationError's errors says, with the key that is wrong."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown key: {key}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be") and isinstance(error["input"], str | int | float):
        message += f", not {str(error['input'])[:64]!r}"
    return f"{key}: {message}" if key else message


def _check_environment() -> None:
    keys = {*PrefillSettings.model_fields, *DecodeSettings.model_fields, *GatewaySettings.model_fields}
    known = {f"{ENV_PREFIX}{key}".upper() for key in keys} | _OTHER_VARIABLES
    unknown = sorted(name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)
    if unknown:
        raise ConfigError(f"unknown in the environment: {', '.join(unknown)}")


def other_settings(own: ServiceSettings) -> ServiceSettings | None:
    """Returns the settings of the other role, or None if `own` names no file for them.

    A setting comes from the file, else from `own` if both roles have it, else from the environment. Raises ConfigError
    if the file cannot be read, or has a key that is wrong, unknown or one of FIXED.
    """
    if own.other_role is None:
        return None
    (kind,) = (kind for role, kind in SETTINGS_OF.items() if role is not own.role)
    given = _given(own.other_role)
    shared = {name: getattr(own, name) for name in type(own).model_fields if name in kind.model_fields}
    shared["draft"] = shared["draft"] or NO_DRAFT
    try:
        return kind(**{**shared, **given})
    except ValidationError as error:
        raise _wrong(own.other_role, "; ".join(map(_describe_error, error.errors()))) from error


def _given(path: Path) -> dict[str, Any]:
    given = _read_yaml("other_role", path)
    if fixed := sorted(FIXED & given.keys()):
        raise _wrong(path, f"{', '.join(fixed)}: is the same in both roles, and set for the process")
    return given


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"other_role: {path}: {what}")
