"""Tests that `make compose-test` kills a container at a moment when it holds rows, and checks that these rows were
retried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.load import EngineLoad, PoolCounts
from common.telemetry.engine_metrics import EngineMetrics
from tests.compose import pair
from tests.compose.chats import Answer, Outcome
from tests.compose.command import CommandFailed
from tests.compose.report import Report
from tests.compose.victim import Victim, rows_in_flight


def metrics(*, running: int = 0, transferring: int = 0, num_row_retries: int = 0) -> str:
    """Returns the metrics of a service with this many rows in use; all others are free."""
    rows = PoolCounts(total=8, free=8 - running - transferring, running=running, transferring=transferring)
    slots = PoolCounts(total=1, free=1)
    load = EngineLoad(rows, slots, num_queued=3, num_running=0, num_steps=0, num_row_retries=num_row_retries)
    EngineMetrics(registry := CollectorRegistry()).watch(lambda: load, is_ready=lambda: True)
    return generate_latest(registry).decode()


@dataclass
class ScriptedContainer:
    """A container that returns the metrics of its script one after the other, and then the last ones again and
    again.
    """

    script: list[str]
    num_kills: int = 0
    num_restarts: int = 1

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


@dataclass
class ScriptedProject:
    prefill: ScriptedContainer
    decode: ScriptedContainer
    waited_for: list[Sequence[str]] = field(default_factory=list)

    def containers(self, service: str) -> list[ScriptedContainer]:
        return [ScriptedContainer([metrics()]), self.prefill] if service == "prefill" else [self.decode]

    def wait_healthy(self, services: Sequence[str], *, timeout_s: float) -> None:
        self.waited_for.append(services)


def problems_of_a_kill(
    patch: pytest.MonkeyPatch, *, rows: int, retries_before: int, retries_after: int
) -> tuple[ScriptedProject, list[str]]:
    """Runs the kill with a load whose requests are all answered. Returns the project and the problems found."""

    def answered(*_chats: object, num_requests: int, report: Report, on_answer: Callable[[int], None]) -> Outcome:
        for num_ended in range(1, num_requests + 1):
            on_answer(num_ended)
        return Outcome([(0, Answer((1,), "eos"))], [])

    for name, stand_in in (("load", answered), ("http", _no_door), ("grpc", _no_door), ("image_of", _image)):
        patch.setattr(pair, name, stand_in)
    decode = ScriptedContainer([metrics(num_row_retries=n) for n in (retries_before, retries_after)])
    project = ScriptedProject(ScriptedContainer([metrics(running=rows)]), decode)
    report = Report()
    anything: Any = project
    pair.kill_a_prefill(anything, report)
    return project, report.problems


def _no_door(_project: object, *, num_fillings: int) -> None:
    assert num_fillings > 0


def _image(_project: object, _service: str) -> str:
    return "gateway-image"


def test_rows_handed_on_since_the_kill_are_what_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    project, problems = problems_of_a_kill(monkeypatch, rows=2, retries_before=3, retries_after=5)
    assert (project.prefill.num_kills, problems) == (1, [])
    assert project.waited_for == [["prefill"]]


def test_retries_from_before_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (problem,) = problems_of_a_kill(monkeypatch, rows=2, retries_before=3, retries_after=3)
    assert problem.startswith("not so: rows were handed to the other replica")


def test_a_load_that_never_reaches_the_victim_kills_nobody_and_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    project, problems = problems_of_a_kill(monkeypatch, rows=0, retries_before=3, retries_after=5)
    assert project.prefill.num_kills == 0
    assert problems == ["not so: killed with 0 rows in flight"]
