"""Tests of what both services, started as users start them with `python -m`, say when they cannot start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = [pytest.param("prefill_service", marks=pytest.mark.thorough), "decode_service"]
START_BOUND_S = 300.0


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "GRPC_"))}


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_wrong_configuration_exits_with_2_and_a_model_that_is_not_there_with_1(module: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("max_row: 3\n")

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *flags],
            check=False,
            capture_output=True,
            text=True,
            timeout=START_BOUND_S,
            env=environment(),
        )

    wrong = run(f"--config={tmp_path / 'wrong.yaml'}")
    (line,) = map(json.loads, wrong.stderr.splitlines())
    assert (wrong.returncode, line["event"], line["error"]) == (2, "cannot_start", "unknown key: max_row")
    for_people = run(f"--config={tmp_path / 'wrong.yaml'}", "--log-format=console").stderr
    assert "unknown key: max_row" in for_people and not for_people.startswith("{")
    for setting, flags in ("model", ()), ("draft", ("--model=demo",)):
        path = tmp_path / "absent"
        absent = run(f"--{setting}={path}", *flags)
        *_, last = map(json.loads, absent.stderr.splitlines())
        assert absent.returncode == 1
        assert last["error"] == f"{setting}: {path}: there is no such file or directory"


@pytest.mark.thorough
@pytest.mark.parametrize("module", PROGRAMS)
def test_a_service_that_cannot_listen_says_why_in_json_lines_and_nothing_else(
    module: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        listen = f"127.0.0.1:{held.getsockname()[1]}"
        flags = (f"--model={tiny_model_dir('llama')}", f"--listen={listen}", "--max-kv-tokens=64", "--num-threads=1")
        ended = subprocess.run(
            [sys.executable, "-m", module, *flags],
            check=False,
            capture_output=True,
            text=True,
            timeout=START_BOUND_S,
            env=environment(),
        )
    *_, last = map(json.loads, ended.stderr.splitlines())
    words = "Address already in use; take another port, or 0 for a free one"
    assert (ended.returncode, last["error"]) == (2, f"listen: cannot listen on {listen}: {words}")
