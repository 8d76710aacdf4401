"""Makes the commands started in these tests find fake services in place of the real ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.client.scripted_inference import ScriptedServer, delta, finished, started

REPOSITORY = Path(__file__).parents[2]
FAKE_SERVICES = Path(__file__).with_name("fake_services")
BOUND_S = 60.0


@pytest.fixture(autouse=True)
def fake_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(FAKE_SERVICES), str(REPOSITORY))))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # so that pairs of other tests are not found
    monkeypatch.chdir(tmp_path)
    for directory in ("tiny", "head"):  # services look for them and never read them
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "config.json").touch()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A decode service that answers "Hello" in two parts."""
    server = ScriptedServer()
    server.inference.script = [started(), delta([5], "Hel"), delta([6], "lo"), finished(num_completion_tokens=2)]
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restores SIGINT's default for the test. If a script starts the suite in the background, the suite ignores SIGINT,
    and its child processes would ignore it too.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def is_alive(pid: int) -> bool:
    """Returns whether the process runs. A zombie counts as ended: only its parent has not collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(pids: Iterable[int]) -> bool:
    """Returns whether all of these processes end within BOUND_S."""
    pids = list(pids)
    deadline = time.monotonic() + BOUND_S
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True
