"""Tests that Ctrl-C cannot stop the main thread inside gRPC's code, where it may leave a lock taken."""

from __future__ import annotations

import _thread
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest

from baton import Client
from baton.client.prefill import PrefillClient
from baton.errors import Cancelled, Unimplemented
from baton.events import Delta, Started
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started

GRPC = str(Path(grpc.__file__).parent)


def functions_of_grpc(run: Callable[[], None]) -> set[str]:
    """Returns the names of gRPC's functions that `run` runs on this thread."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(GRPC):
            names.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def test_no_call_of_the_client_runs_grpc_on_the_main_thread(server: ScriptedServer, client: Client) -> None:
    server.inference.script = [started(), delta([5], "Hello"), finished(num_completion_tokens=1)]
    prefill = PrefillClient(server.address)

    def run() -> None:
        assert client.complete("Hi").text == "Hello"
        with client.generate("Hi") as events:
            next(events)
        assert client.model_info().model == "demo"
        client.load()
        client.health()
        with pytest.raises(Unimplemented):
            prefill.load()
        client.close()
        prefill.close()

    assert functions_of_grpc(run) <= {"__del__"}, "which takes no other lock than that of a call that is over"
    assert "close" in functions_of_grpc(lambda: grpc.insecure_channel(server.address).close())


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_a_read_that_a_signal_ends_cancels_the_call(
    raised: type[BaseException], server: ScriptedServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(*_: object) -> None:
        raise raised

    def start_and_signal(*args: Any) -> None:
        monkeypatch.undo()
        _thread.start_new_thread(*args)
        signal.raise_signal(signal.SIGALRM)

    server.inference.script = [started(), delta([5], "Hel"), server.inference.HOLD]
    events = client.generate("Hi")
    assert [type(next(events)) for _ in range(2)] == [Started, Delta]
    previous = signal.signal(signal.SIGALRM, handle)
    try:
        monkeypatch.setattr("_thread.start_new_thread", start_and_signal)
        with pytest.raises(raised):
            next(events)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert server.inference.call_ended.wait(BOUND_S)
    with pytest.raises(Cancelled):
        next(events)
    assert events.progress.generated_token_ids == (5,)


def test_where_no_thread_can_start_calls_run_on_this_one(
    server: ScriptedServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    server.inference.script = [started(), delta([5], "Hello"), finished(num_completion_tokens=1)]
    monkeypatch.setattr("_thread.start_new_thread", fail)
    assert client.complete("Hi").text == "Hello"
    client.close()
