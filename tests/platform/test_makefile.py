"""Tests of `make` on a fresh checkout: every target does its own set-up, torch first, and a second run sets nothing
up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP_INSTALL = "-m pip install"
TARGETS = (
    "demo",
    "test",
    "compose-test",
    "kubernetes-test",
    "ray-test",
    "clients-test",
    "check",
    "stubs",
    "parity",
    "bench",
    "soak",
    "fuzz",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def dry_run(directory: Path, *arguments: str) -> list[str]:
    """Returns the commands that make would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    result = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout.splitlines()


@pytest.mark.parametrize("target", TARGETS)
def test_a_fresh_checkout_gets_torch_first_and_alone(checkout: Path, target: str) -> None:
    commands = dry_run(checkout, target)
    assert any("-m venv .venv" in command for command in commands)
    installs = [command for command in commands if PIP_INSTALL in command]
    assert "requirement.py torch" in installs[0]
    assert "--editable '.[engine,gateway]'" in installs[1]


@pytest.mark.parametrize("target", TARGETS)
def test_an_environment_that_is_there_is_left_alone(checkout: Path, target: str) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.installed").touch()
    (checkout / ".venv/.installed-dev").touch()
    (checkout / ".venv/.installed-fuzz").touch()
    assert not any(PIP_INSTALL in command for command in dry_run(checkout, target))


def test_an_interrupted_installation_is_taken_up_again(checkout: Path) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    assert sum(PIP_INSTALL in command for command in dry_run(checkout, "demo")) == 2


def test_the_gpu_suite_uses_the_machines_own_python(checkout: Path) -> None:
    commands = dry_run(checkout, "gpu")
    assert len(commands) == 1
    assert commands[0].startswith("python3 -m pytest")


def test_a_requirement_is_printed_as_the_project_states_it(checkout: Path) -> None:
    command = ["python3", "scripts/requirement.py", "torch"]
    assert subprocess.check_output(command, cwd=checkout, text=True, timeout=60) == "torch>=2.11,<2.14\n"
