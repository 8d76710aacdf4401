"""Invariants I12 and I13: when results are taken, what a failed forward leaves, and what draws depend on. test_any_life
has the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.device.stream import DeviceTimeout, Event
from common.errors import EngineFault
from decode_service.schedule.results import ResultTaker
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import ScriptedEngine
from tests.engine.mutants import tokens
from tests.engine.mutants.kinds import instead_of
from tests.support.scripted_device import ScriptedDevice, refuse, run_needed


def check_results_lag_one_step() -> None:
    """With overlap the next step is launched before this step's results are taken; without it, afterwards."""
    launched_before_results = {}
    for overlap in (True, False):
        scripted = ScriptedEngine(overlap=overlap)
        outcome = scripted.submit("a", [1, 2], 6)
        seen: list[int] = []

        def count_launched(device: ScriptedDevice, event: Event, seen: list[int] = seen) -> None:
            seen.append(device.stream("forward").pending().count("verify"))
            run_needed(device, event)

        scripted.device.on_synchronize = count_launched
        scripted.run()
        assert outcome.token_ids == outcome.expected
        launched_before_results[overlap] = max(seen)
    assert launched_before_results == {True: 2, False: 1}, "the schedule side does not run ahead as configured"


def test_a_forward_that_cannot_be_prepared_fails_its_own_requests_alone() -> None:
    scripted = ScriptedEngine()
    bad = scripted.submit("bad", [1, 2], 9)
    scripted.start("bad")
    scripted.model.fails_to_prepare = True
    scripted.run()
    assert isinstance(bad.error, EngineFault) and "no room" in str(bad.error)
    good = scripted.submit("good", [3, 4], 9)
    scripted.start("good")
    scripted.run()
    assert good.token_ids == good.expected, "the engine did not go on"


@broken_by(tokens.noise_without_seed, "draw alike")
def check_the_seed_matters() -> None:
    scripted = ScriptedEngine()
    outcomes = [scripted.submit(str(seed), [1, 2, 3], 3, temperature=1.0, seed=seed) for seed in range(4)]
    scripted.run()
    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == 4, "requests of different seeds draw alike"


@broken_by(tokens.failure_outlives_its_step, "another one's requests")
def check_a_failed_forward_fails_its_own_requests_alone() -> None:
    """When a step fails, the next one is already in flight, with the same rows and a new one."""
    scripted = ScriptedEngine()
    bad = scripted.submit("bad", [1, 2], 9)
    scripted.start("bad")
    good = scripted.submit("good", [3, 4], 9)
    scripted.step()
    scripted.hand_over("good")
    scripted.step()
    scripted.landing.run_all()
    assert "verify" in scripted.forward.pending()
    scripted.model.fails_next = True
    scripted.run()
    assert isinstance(bad.error, EngineFault) and "no kernel" in str(bad.error)
    assert good.token_ids == good.expected, "a failed step took another one's requests along"


def test_a_step_that_does_not_end_is_not_waited_for_without_end() -> None:
    scripted = ScriptedEngine(device=ScriptedDevice(on_synchronize=refuse), max_rows=2, max_kv_tokens=60, overlap=False)
    scripted.submit("a", [1, 2, 3], 4)
    with pytest.raises(DeviceTimeout):
        scripted.run()


def test_results_are_taken_once_the_next_step_does_nothing_but_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes a step's results once the Python part of the next step has run. On threads, the two would
    compete for the interpreter.
    """
    scripted = ScriptedEngine()
    scripted.submit("only", [5, 6, 7], 8)
    scripted.start("only")
    left: list[list[str]] = []

    @instead_of(ResultTaker, "take")
    def looked_at(take: Callable[..., None], *args: Any) -> None:
        left.append(scripted.forward.pending())
        take(*args)

    looked_at(monkeypatch)
    scripted.run()
    assert left[0] == ["verify", "stash_payload", "copy_results"]
    assert left[-1] == [], "behind the last step there is none"


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
