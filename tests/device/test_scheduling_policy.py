"""Threads that compute a forward keep the normal scheduling policy, whichever thread started them. A service's other
work runs as SCHED_BATCH.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from baton_cpu.program.kernel.team import Team
from common.device.cpu import CpuDevice
from common.device.stream import StreamKind
from common.host import cores
from common.host.cores import compute, wait_for_computing

BOUND_S = 60.0


def policies(work: Callable[[SimpleQueue[int]], object]) -> list[int]:
    """Returns two scheduling policies: that of a thread after `wait_for_computing`, and the one that `work`, called on
    that thread, reports.
    """
    seen: SimpleQueue[int] = SimpleQueue()

    def run() -> None:
        wait_for_computing()
        seen.put(os.sched_getscheduler(0))
        work(seen)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(BOUND_S)
    return [seen.get(timeout=BOUND_S) for _ in range(2)]


@pytest.mark.parametrize(
    ("kind", "expected"), [(StreamKind.COMPUTE, os.SCHED_OTHER), (StreamKind.COPY, os.SCHED_BATCH)]
)
def test_a_stream_that_computes_does_not_wait_and_one_that_copies_does(kind: StreamKind, expected: int) -> None:
    def on_a_stream(seen: SimpleQueue[int]) -> None:
        device = CpuDevice(num_threads=1)
        device.new_stream("a", kind).enqueue(lambda: seen.put(os.sched_getscheduler(0)))
        device.close(BOUND_S)

    assert policies(on_a_stream) == [os.SCHED_BATCH, expected]


def test_a_teams_helper_does_not_wait() -> None:
    def in_a_team(seen: SimpleQueue[int]) -> None:
        def take_part(*arguments: Any) -> None:
            seen.put(os.sched_getscheduler(0))

        team = Team(num_threads=2, max_operations=1, num_call_words=1, take_part=take_part)
        assert team.close(BOUND_S)

    assert policies(in_a_team) == [os.SCHED_BATCH, os.SCHED_OTHER]


@pytest.mark.parametrize("name", ["sched_getscheduler", "sched_setscheduler"])
def test_what_a_sandbox_refuses_is_gone_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def refuse(*arguments: Any) -> None:
        refused.append(name)
        raise PermissionError

    monkeypatch.setattr(cores, "ours", {"waiting"})
    monkeypatch.setattr(os, name, refuse)
    wait_for_computing()
    compute()
    assert refused


def test_a_policy_that_is_not_the_systems_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that is not the system's default was chosen on purpose."""
    monkeypatch.setattr(cores, "ours", set())
    seen: list[int] = []

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        compute()
        seen.append(os.sched_getscheduler(0))
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        wait_for_computing()
        seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(BOUND_S)
    assert seen == [os.SCHED_BATCH, os.SCHED_IDLE]
