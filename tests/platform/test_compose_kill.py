"""Tests that `make compose-test` kills a container once, at a moment when it holds rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.telemetry.metrics import EngineMetrics
from common.telemetry.stats import EngineLoad, PoolCounts
from tests.compose.command import CommandFailed
from tests.compose.victim import Victim, rows_in_flight


def metrics(*, running: int = 0, transferring: int = 0) -> str:
    """Returns the metrics of a service with this many rows in use; all others are free."""
    rows = PoolCounts(total=8, free=8 - running - transferring, running=running, transferring=transferring)
    slots = PoolCounts(total=1, free=1)
    load = EngineLoad(rows, slots, num_queued=3, num_running=0, num_steps=0)
    EngineMetrics(registry := CollectorRegistry()).watch(lambda: load, is_ready=lambda: True)
    return generate_latest(registry).decode()


@dataclass
class ScriptedContainer:
    """A container that returns the metrics of its script one after the other, and then the last ones again and
    again.
    """

    script: list[str]
    num_kills: int = 0

    def metrics(self) -> str:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def crash(self, *, image: str) -> None:
        assert image == "gateway-image"
        self.num_kills += 1


def test_rows_that_hold_something_are_in_flight() -> None:
    assert rows_in_flight(metrics()) == 0
    assert rows_in_flight(metrics(running=2, transferring=3)) == 5
    with pytest.raises(CommandFailed, match="baton_rows"):
        rows_in_flight("")


def test_it_is_killed_once_and_not_before_it_has_rows_in_flight() -> None:
    container = ScriptedContainer([metrics(), metrics(), metrics(running=2), metrics(running=4)])
    victim = Victim(container, image="gateway-image", kill_after=3)
    killed = []
    for num_ended in range(1, 9):
        victim.on_answer(num_ended)
        killed.append(container.num_kills)
    assert killed == [0, 0, 0, 0, 1, 1, 1, 1]
    assert victim.num_rows_lost == 2
