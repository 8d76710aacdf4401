"""Invariant I12: tokens are the same with overlap on or off, for any arrivals and aborts, and in any order of the
streams.

tests/pair/test_parity_tiny.py shows the same on real models, with chunked prefill.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.device.errors import DeviceTimeout
from common.device.scripted import ScriptedDevice, pick_with, refuse, run_needed
from common.device.stream import Event
from common.errors import EngineFault
from decode_service.schedule.results import StepInFlight
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import ScriptedEngine
from tests.engine.mutants import lengths, relay, rows, tokens

NUM_SEEDS = 10


def random_device(numbers: random.Random) -> ScriptedDevice:
    """Returns a device whose streams may run between any two calls of the engine, as threads would. The choice among
    them is uniform.
    """

    def run_some(device: ScriptedDevice) -> None:
        while numbers.random() < 0.3 and (ready := device.ready_streams()):
            numbers.choice(ready).run_next()

    return ScriptedDevice(on_synchronize=pick_with(numbers.choice), on_host_call=run_some)


def num_retracted_under(seed: int, *, overlap: bool) -> int:
    """Runs a dozen greedy and sampled requests through three rows, aborts some, and returns how many were retracted."""
    numbers = random.Random(seed)
    scripted = ScriptedEngine(device=random_device(numbers), max_rows=3, max_kv_tokens=72, overlap=overlap)
    for arrival in range(12):
        prompt = [numbers.randrange(1, 900) for _ in range(numbers.randint(1, 7))]
        temperature = numbers.choice([0.0, 0.0, 1.0])
        scripted.submit(str(arrival), prompt, numbers.choice([1, 2, 6, 20, 40]), temperature=temperature, seed=arrival)
        for _ in range(numbers.randint(0, 4)):
            scripted.step()
            for waiting in list(scripted.handoffs):
                if numbers.random() < 0.7:
                    scripted.hand_over(waiting)
        if numbers.random() < 0.3:
            scripted.abort(str(numbers.randint(0, arrival)))
    scripted.run(advance=run_one_each)
    for request_id, outcome in scripted.outcomes.items():
        wanted = outcome.expected[: len(outcome.token_ids)] if outcome.is_abandoned else outcome.expected
        assert outcome.token_ids == wanted, f"seed {seed}: {request_id} was decoded wrongly"
    return scripted.engine.load().num_retractions


def run_one_each(device: ScriptedDevice) -> None:
    for stream in device.ready_streams():
        stream.run_next()


def assert_right_for_every_seed(overlap: bool) -> None:
    num_retractions = sum(num_retracted_under(seed, overlap=overlap) for seed in range(NUM_SEEDS))
    assert num_retractions > 0, "nothing was retracted: the pool is too large for this test"


@broken_by(tokens.results_in_another_order, "decoded wrongly")
@broken_by(relay.relay_is_a_ring, "decoded wrongly")
@broken_by(lengths.lengths_changed_in_place_under_the_forward, "decoded wrongly")
@broken_by(rows.live_table_rewritten, "decoded wrongly")
@broken_by(rows.row_merged_before_its_copies, "decoded wrongly")
def check_overlapped() -> None:
    assert_right_for_every_seed(overlap=True)


def check_not_overlapped() -> None:
    assert_right_for_every_seed(overlap=False)


def check_results_lag_one_step() -> None:
    """With overlap the next step is launched before this step's results are taken; without it, afterwards."""
    launched_before_results = {}
    for overlap in (True, False):
        scripted = ScriptedEngine(overlap=overlap)
        outcome = scripted.submit("a", [1, 2], 6)
        seen: list[int] = []

        def count_launched(device: ScriptedDevice, event: Event, seen: list[int] = seen) -> None:
            seen.append(device.stream("forward").pending().count("decode"))
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
    assert "decode" in scripted.forward.pending()
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
    take = scripted.engine._taker.take

    def looked_at(step: StepInFlight, *args: Any) -> None:
        left.append(scripted.forward.pending())
        take(step, *args)

    monkeypatch.setattr(scripted.engine._taker, "take", looked_at)
    scripted.run()
    assert left[0] == ["decode", "stash_payload", "copy_results"]
    assert left[-1] == [], "behind the last step there is none"


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
