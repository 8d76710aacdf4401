"""Reads the settings that a process has in its other role: as a decode service if it begins as a prefill service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.config.load import describe_error, read_yaml
from common.config.settings import NO_DRAFT, DecodeSettings, PrefillSettings, Role, ServiceSettings
from common.errors import ConfigError

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
        raise _wrong(own.other_role, "; ".join(map(describe_error, error.errors()))) from error


def _given(path: Path) -> dict[str, Any]:
    given = read_yaml("other_role", path)
    if fixed := sorted(FIXED & given.keys()):
        raise _wrong(path, f"{', '.join(fixed)}: is the same in both roles, and set for the process")
    return given


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"other_role: {path}: {what}")
