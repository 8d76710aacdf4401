"""Tests of a service's background work: it runs in order and ends with the service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.server_info import HealthStatus
from common.config.settings import DecodeSettings, PrefillSettings
from common.kv.pool import KvPool
from common.service.work_beside import Check, Stopped, WorkBeside
from decode_service import main as decode_main
from prefill_service import main as prefill_main
from tests.support.free_ports import free_address
from tests.support.services_here import serving_here, until

BOUND_S = 60.0


def test_works_are_done_in_order() -> None:
    done: list[str] = []
    is_done = threading.Event()
    beside = WorkBeside()
    beside.start(lambda check: done.append("first"), lambda check: done.append("second"), lambda check: is_done.set())
    assert is_done.wait(BOUND_S) and beside.stop(BOUND_S)
    assert done == ["first", "second"]


def test_it_ends_between_two_parts_and_begins_nothing_more() -> None:
    has_begun, seen = threading.Event(), list[BaseException]()

    def for_ever(check: Check) -> None:
        has_begun.set()
        try:
            while True:
                check()
        except Stopped as error:
            seen.append(error)
            raise

    beside = WorkBeside()
    beside.start(for_ever, lambda check: pytest.fail("begun after the end"))
    assert has_begun.wait(BOUND_S) and beside.stop(BOUND_S)
    assert len(seen) == 1


def test_one_that_was_never_started_is_stopped_at_once() -> None:
    """This case occurs when a service fails to start."""
    assert WorkBeside().stop(0.0)


def test_one_that_is_started_after_it_was_stopped_begins_nothing() -> None:
    """This case occurs when a service ends while another thread starts its work."""
    beside, later = WorkBeside(), list[str]()
    assert beside.stop(0.0)
    beside.start(lambda check: later.append("begun"))
    assert beside.stop(BOUND_S) and not beside.has_started and later == []


def test_one_that_is_stopped_while_it_starts_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, may_start, stopped = threading.Event(), threading.Event(), list[bool]()
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "work-beside":
            starts.set()
            may_start.wait(BOUND_S)
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    beside = WorkBeside()
    starting = threading.Thread(target=beside.start, args=(lambda check: None,))
    starting.start()
    assert starts.wait(BOUND_S)
    stopping = threading.Thread(target=lambda: stopped.append(beside.stop(BOUND_S)))
    stopping.start()
    stopping.join(0.1)  # it may not end before the thread has started
    may_start.set()
    for thread in (starting, stopping):
        thread.join(BOUND_S)
    assert stopped == [True]


def test_one_that_does_not_end_is_told_and_nothing_begins_after_it() -> None:
    has_begun, may_end, beside, later = threading.Event(), threading.Event(), WorkBeside(), list[str]()

    def wait(_check: Check) -> None:
        has_begun.set()
        may_end.wait(BOUND_S)

    beside.start(wait, lambda check: later.append("begun"))
    assert has_begun.wait(BOUND_S) and not beside.stop(0.01)
    may_end.set()
    assert beside.stop(BOUND_S) and later == []


def test_one_that_fails_is_logged_and_the_next_begins() -> None:
    is_done, beside = threading.Event(), WorkBeside()

    def fail(_check: Check) -> None:
        raise ValueError("no such thing")

    with capture_logs() as logs:
        beside.start(fail, lambda check: is_done.set())
        assert is_done.wait(BOUND_S) and beside.stop(BOUND_S)
    assert [(line["event"], line["log_level"], line["exc_info"]) for line in logs] == [
        ("work_beside_failed", "error", True)
    ]


def test_one_that_gets_no_thread_is_logged_and_the_service_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    beside = WorkBeside()
    with capture_logs() as logs:
        beside.start(lambda check: None)
    assert [(line["event"], line["log_level"]) for line in logs] == [("work_beside_failed", "error")]
    assert not beside.has_started and beside.stop(0.0)


async def test_both_services_populate_their_pools_once_they_are_ready_and_not_before(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {
        "model": str(tiny_model_dir("llama")),
        "dtype": "float32",
        "num_threads": 1,
        "disabled_fast_paths": "fused_forwards",
    }
    prefill = PrefillSettings(listen=free_address(), max_kv_tokens=512, **common)
    decode = DecodeSettings(listen=free_address(), prefill=(prefill.listen,), max_kv_tokens=1024, **common)
    populated: list[int] = []
    monkeypatch.setattr(KvPool, "populate", lambda pool, check: populated.append(pool.num_free_slots))
    async with serving_here(decode_main, decode, "baton.v1.Inference") as service:
        await service.turns(HealthStatus.NOT_SERVING)  # while it has no replica
        assert populated == []
        async with serving_here(prefill_main, prefill, "baton.v1.Prefill"):
            await service.turns(HealthStatus.SERVING)
            await until(lambda: sorted(populated) == [512, 1024])
