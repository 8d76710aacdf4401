"""Every target of the Makefile does its own set-up on a fresh checkout, torch first, and sets nothing up again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.lint.problem import ROOT, Problem, line_of

MAKEFILE = ROOT / "Makefile"
WITHOUT_ENVIRONMENT = {"help", "gpu", "clean"}
_STAMPS = (".installed", ".installed-dev", ".installed-fuzz")


def a_fresh_checkout_gets_torch_first_and_alone() -> Iterator[Problem]:
    for target in _targets():
        with _checkout() as directory:
            commands = _dry_run(directory, target)
        torch, ours, *_ = [*(command for command in commands if "-m pip install" in command), "", ""]
        if not any("-m venv .venv" in command for command in commands):
            yield _problem(target, "makes no environment")
        if not ("requirement.py torch" in torch and "--editable '.[engine,gateway]'" in ours):
            yield _problem(target, "does not install torch first")


def an_environment_that_is_there_is_left_alone() -> Iterator[Problem]:
    with _checkout() as directory:
        (directory / ".venv").mkdir()
        for stamp in _STAMPS:
            (directory / ".venv" / stamp).touch()
        if any("-m pip install" in command for command in _dry_run(directory, *_targets())):
            yield Problem(MAKEFILE, 0, "a target installs again")


def an_interrupted_installation_is_taken_up_again() -> Iterator[Problem]:
    with _checkout() as directory:
        (directory / ".venv/bin").mkdir(parents=True)
        if sum("-m pip install" in command for command in _dry_run(directory, "demo")) != 2:
            yield _problem("demo", "leaves a half installation as it is")


def the_gpu_suite_uses_the_machines_own_python() -> Iterator[Problem]:
    with _checkout() as directory:
        commands = _dry_run(directory, "gpu")
    if len(commands) != 1 or not commands[0].startswith("python3 -m pytest"):
        yield _problem("gpu", "does not run the machine's own python3 alone")


def _targets() -> list[str]:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    return sorted({*phony.split()} - WITHOUT_ENVIRONMENT)


def _problem(target: str, text: str) -> Problem:
    return Problem(MAKEFILE, line_of(MAKEFILE.read_text(), f"\n{target}:") + 1, f"{target} {text}")


@contextmanager
def _checkout() -> Iterator[Path]:
    """A checkout without an environment."""
    with tempfile.TemporaryDirectory() as directory:
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, directory)
        shutil.copytree(ROOT / "scripts", Path(directory) / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(directory)


def _dry_run(directory: Path, *targets: str) -> list[str]:
    """Returns the commands that make would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    result = subprocess.run(
        ["make", "--dry-run", f"PYTHON={sys.executable}", *targets],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout.splitlines()
