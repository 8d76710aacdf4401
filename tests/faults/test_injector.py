"""Tests that a plan decides which faults happen, the same ones in every run. Without a planned fault, nothing goes
wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from common.device.cpu import CpuDevice
from common.device.stream import PieceFailed, Scope
from tests.faults.device import FaultyDevice
from tests.faults.frames import FaultyContext
from tests.faults.injector import InjectedFault, Injector
from tests.faults.plan import Action, Fault, FaultPlan

SENT = [bytes([number]) * 4 for number in range(1, 7)]


def plan_of(*faults: Fault, seed: int = 0) -> Injector:
    return Injector(FaultPlan(faults=faults, seed=seed))


class RecordingContext:
    """A call whose peer accepts everything written, and sends `commands`."""

    def __init__(self, commands: Sequence[object] = ()) -> None:
        self.written: list[bytes] = []
        self._commands = list(commands)

    async def write(self, data: bytes) -> None:
        self.written.append(data)

    async def read(self) -> object:
        return self._commands.pop(0)


def written(injector: Injector) -> list[bytes]:
    context = RecordingContext()

    async def write_all() -> None:
        faulty = FaultyContext(context, injector)
        for data in SENT:
            await faulty.write(data)
        await faulty.end()

    asyncio.run(write_all())
    return context.written


@pytest.mark.parametrize(
    ("faults", "order"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"action": Action.DROP, "at": 3}, [0, 1, 3, 4, 5]),
        ({"action": Action.DUPLICATE, "at": 3}, [0, 1, 2, 2, 3, 4, 5]),
        ({"action": Action.REORDER, "at": 3}, [0, 1, 3, 2, 4, 5]),
        ({"action": Action.REORDER, "at": 6}, [0, 1, 2, 3, 4, 5]),  # nothing overtakes the last one
        ({"action": Action.DELAY, "at": 3, "seconds": 0.01}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_frame_that_is_hit_is_lost_repeated_overtaken_or_late(faults: dict[str, Any], order: list[int]) -> None:
    plan = [Fault(point="handoff.frame", **faults)] if faults else []
    assert written(plan_of(*plan)) == [SENT[number] for number in order]


@pytest.mark.parametrize("action", [Action.TRUNCATE, Action.CORRUPT])
def test_the_frame_that_is_hit_is_damaged(action: Action) -> None:
    arrived = written(plan_of(Fault(point="handoff.frame", action=action, at=3)))
    assert arrived[:2] + arrived[3:] == SENT[:2] + SENT[3:]
    assert arrived[2] != SENT[2]
    assert len(arrived[2]) < 4 if action is Action.TRUNCATE else len(arrived[2]) == 4


@pytest.mark.parametrize(
    ("action", "order"),
    [(Action.DROP, [0, 2]), (Action.DUPLICATE, [0, 1, 1, 2])],
)
def test_commands_are_lost_or_repeated_on_their_way_in(action: Action, order: list[int]) -> None:
    context = RecordingContext([*SENT[:3], None])
    faulty = FaultyContext(context, plan_of(Fault(point="handoff.command", action=action, at=2)))

    async def read_all() -> list[object]:
        return [await faulty.read() for _ in range(len(order) + 1)]

    assert asyncio.run(read_all()) == [*(SENT[number] for number in order), None]


def hits(seed: int, rate: float) -> list[int]:
    injector = plan_of(Fault(point="pool.reserve", action=Action.FAIL, rate=rate), seed=seed)
    return [visit for visit in range(1000) if injector.visit("pool.reserve")]


def test_a_rate_hits_the_same_visits_in_every_run_with_its_seed() -> None:
    assert hits(1, 0.05) == hits(1, 0.05) != hits(2, 0.05)
    assert 30 <= len(hits(1, 0.05)) <= 75


def test_a_fault_happens_at_most_so_many_times() -> None:
    injector = plan_of(Fault(point="pool.reserve", action=Action.FAIL, rate=1.0, at_most=2))
    assert [injector.visit("pool.reserve") is not None for _ in range(4)] == [True, True, False, False]


def test_more_than_half_of_the_visits_of_a_point_are_counted() -> None:
    told: list[tuple[str, int]] = []
    plan = FaultPlan(faults=(Fault(point="pool.reserve", action=Action.FAIL, at=3),))
    injector = Injector(plan, count=lambda point, num_visits: told.append((point, num_visits)))
    for visit in range(1, 101):
        injector.visit("pool.reserve")
        injector.visit("memory.host")  # not counted: no fault of the plan watches it
        assert visit / 2 < sum(number for _, number in told) <= visit
    assert {point for point, _ in told} == {"pool.reserve"}


def test_a_piece_raises_stalls_or_runs_out_of_memory_and_the_others_run_on() -> None:
    injector = plan_of(
        Fault(point="stream.forward.verify", action=Action.RAISE, at=1),
        Fault(point="stream.forward", action=Action.STALL, at=3, seconds=0.01),
        Fault(point="memory.host", action=Action.FAIL, at=1),
    )
    inner = CpuDevice(num_threads=1)
    device = FaultyDevice(inner, injector)
    stream = device.new_stream("forward")
    ran: list[str] = []

    def verify() -> None:
        ran.append("verify")

    def publish() -> None:
        device.host_buffer((1,), torch.int64)

    failed, short_of_memory, good = Scope("one"), Scope("two"), Scope("three")
    for work, scope in ((verify, failed), (publish, short_of_memory), (verify, good)):
        stream.enqueue(work, scope)
    ends = [stream.record(scope) for scope in (failed, short_of_memory, good)]
    for end, kind in zip(ends, (InjectedFault, torch.OutOfMemoryError), strict=False):
        with pytest.raises(PieceFailed) as caught:
            end.synchronize(10.0)
        assert isinstance(caught.value.__cause__, kind)
    ends[2].synchronize(10.0)
    assert ran == ["verify"], "the second verify ran, the first did not"
    device.close(10.0)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"point": "nowhere", "action": "drop", "at": 1}, "there is no 'nowhere'"),
        ({"point": "stream.schedule", "action": "stall", "at": 1, "seconds": 1}, "there is no 'stream.schedule'"),
        ({"point": "stream.sending.land", "action": "raise", "at": 1}, "there is no 'stream.sending.land'"),
        ({"point": "pool.reserve", "action": "drop", "at": 1}, "drop cannot happen at pool.reserve"),
        ({"point": "handoff.frame", "action": "drop"}, "give either at or rate"),
        ({"point": "handoff.frame", "action": "delay", "at": 1}, "delay takes some"),
        ({"point": "handoff.frame", "action": "drop", "at": 1, "seconds": 1}, "drop takes none"),
        ({"point": "handoff.frame", "action": "drop", "at": 1, "chance": 1}, "chance"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(fault: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        FaultPlan.model_validate({"faults": [fault]})
