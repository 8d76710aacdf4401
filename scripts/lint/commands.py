"""The commands that pages quote exist, with the options that they are given."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from baton.cli.main import app
from common.config.settings import DecodeSettings, GatewaySettings, PrefillSettings, ProcessSettings
from scripts.lint.pages import all_pages, quoted_commands
from scripts.lint.problem import ROOT, Problem, line_of

_COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
_PROCESSES: dict[str, type[ProcessSettings]] = {
    "prefill_service": PrefillSettings,
    "decode_service": DecodeSettings,
    "gateway": GatewaySettings,
}


def quoted_commands_exist() -> Iterator[Problem]:
    for page in all_pages():
        for command in quoted_commands(page):
            if problem := problem_of(command):
                yield Problem(page, line_of(page.read_text(), command), f"{problem}: {command}")


def problem_of(command: str) -> str:
    """Returns the problem of a quoted command, such as a target that does not exist, or "" if there is none. Commands
    of other projects are not checked.
    """
    words = shlex.split(command, comments=True)
    while words and (words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
        words.pop(0)
    if not words:
        return ""
    program, rest = Path(words[0]).name, words[1:]
    if program == "make":
        return _problem_of_make(rest)
    if program == "baton":
        return _problem_of_baton(rest)
    if program in ("python", "python3") and rest[:1] == ["-m"] and rest[1:]:
        return _problem_of_module(rest[1], rest[2:])
    return ""


def _problem_of_make(words: list[str]) -> str:
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    unknown = [word for word in words if re.fullmatch("[a-z-]+", word) and word not in targets]
    return f"no target {unknown[0]}" if unknown else ""


def _problem_of_baton(words: list[str]) -> str:
    if words[:1] == ["--help"]:
        return ""
    command = _COMMANDS.get(words[0])
    return f"no command {words[0]}" if command is None else _unknown_option(words[1:], _options_of(command), "option")


def _options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def _problem_of_module(module: str, words: list[str]) -> str:
    if module.split(".")[0] not in {path.name for path in ROOT.iterdir()}:
        return ""  # a command of pytest or another project, which is not checked
    if importlib.util.find_spec(module) is None:
        return f"no module {module}"
    if module not in _PROCESSES:
        return ""
    flags = {f"--{name.replace('_', '-')}" for name in _PROCESSES[module].model_fields}
    flags |= {flag.replace("--", "--no-", 1) for flag in flags}
    return _unknown_option(words, flags, "setting")


def _unknown_option(words: list[str], known: set[str], kind: str) -> str:
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [option for option in options if option not in known]
    return f"no {kind} {unknown[0]}" if unknown else ""
