"""Tests of a retracted request until it ends: what can end it in each phase, and how many failures it survives on its
way back.

A request gives up its slots at once if no step in flight includes it, and otherwise when that step's results are taken.
In between it is in phase RETRACTING, which begins and ends within one step, so no command can arrive in it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import DeadlineExceeded, EngineFault, PrefillUnavailable, RowFailure
from decode_service.messages import FinishAtStop, FinishReason, Replica, ReplicasChanged, StartHandoff
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import REPLICA, Clock, Outcome, ScriptedEngine
from tests.engine.mutants import retraction
from tests.engine.speculating import CHAIN

OLDER, YOUNGER = [1, 2, 3], [4]


def two_that_do_not_fit(
    stop_token_ids: tuple[int, ...] = (), clock: Clock | None = None, *, speculates: bool = False
) -> tuple[ScriptedEngine, Outcome]:
    """Returns an engine with an older and a younger request that do not both fit, and the outcome of the younger, which
    will be retracted.
    """
    spec_info = CHAIN if speculates else None
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=48, clock=clock, spec_info=spec_info)
    scripted.submit("older", OLDER, 40)
    return scripted, scripted.submit("younger", YOUNGER, 40, stop_token_ids=stop_token_ids)


def step_until(scripted: ScriptedEngine, is_there: Callable[[], bool], *, hands_over: bool = True) -> None:
    for _ in range(200):
        if is_there():
            return
        scripted.step()
        for name in list(scripted.handoffs) if hands_over else ():
            scripted.hand_over(name)
        scripted.landing.run_all()
    raise AssertionError(f"not there: {scripted.engine.load()}")


def step_until_retracted(scripted: ScriptedEngine) -> None:
    step_until(scripted, lambda: scripted.engine.load().num_retractions == 1)


def step_until_it_waits_for_prefill(scripted: ScriptedEngine) -> None:
    """Steps until the older request has ended and the younger one is handed off again."""
    step_until_retracted(scripted)
    step_until(scripted, lambda: "younger" in scripted.handoffs, hands_over=False)


# ---- endings --------------------------------------------------------------------------------------------------------


def tokens_of_the_step_that_carries_it(*, speculates: bool) -> list[int]:
    """Returns the tokens that the younger request gets from the step in flight when it gives way."""
    scripted, younger = two_that_do_not_fit(speculates=speculates)
    while not scripted.engine.load().num_retractions:
        num_before = len(younger.token_ids)
        scripted.step_and_hand_over()
        scripted.landing.run_all()
    given = younger.token_ids[num_before:]
    scripted.run()
    assert younger.token_ids == younger.expected, "tokens were lost or repeated"
    return given


@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "chain"])
def test_what_the_step_in_flight_gives_a_retracted_request_is_its_own(speculates: bool) -> None:
    given = tokens_of_the_step_that_carries_it(speculates=speculates)
    assert given, "no step was in flight"


def test_a_stop_token_in_the_step_in_flight_ends_a_retracted_request() -> None:
    (last,) = tokens_of_the_step_that_carries_it(speculates=False)
    scripted, younger = two_that_do_not_fit(stop_token_ids=(last,))
    place = younger.expected.index(last)
    step_until_retracted(scripted)
    assert younger.finished is not None, "it was requeued though it had ended"
    assert (younger.finished.reason, younger.finished.timings.num_retractions) == (FinishReason.STOP_TOKEN, 1)
    assert younger.token_ids == younger.expected[: place + 1]
    assert scripted.engine.load().num_queued == 0
    scripted.run()


def test_a_step_that_fails_with_a_retracted_request_ends_it_once() -> None:
    scripted, younger = two_that_do_not_fit()
    step_until(scripted, lambda: scripted.engine.pool.num_free_slots == 0)
    scripted.model.fails_next = True
    scripted.run()
    assert isinstance(younger.error, EngineFault) and younger.finished is None


WHERE: dict[str, Callable[[ScriptedEngine], None]] = {
    "waiting for slots": step_until_retracted,
    "at prefill again": step_until_it_waits_for_prefill,
}


@pytest.mark.parametrize("where", WHERE)
def test_a_client_that_leaves_a_retracted_request_frees_all(where: str) -> None:
    scripted, younger = two_that_do_not_fit()
    WHERE[where](scripted)
    scripted.abort("younger")
    num_before = len(younger.token_ids)
    scripted.run()
    assert (len(younger.token_ids), younger.finished, younger.error) == (num_before, None, None)


@pytest.mark.parametrize("where", WHERE)
def test_a_stop_string_matched_in_what_a_retracted_request_delivered_ends_it(where: str) -> None:
    scripted, younger = two_that_do_not_fit()
    WHERE[where](scripted)
    num_before = len(younger.token_ids)
    scripted.post(FinishAtStop("younger", num_before - 1, "stop"))
    scripted.handoffs.pop("younger", None)
    scripted.run()
    assert younger.finished is not None and younger.error is None
    finished = younger.finished
    assert (finished.reason, finished.num_completion_tokens) == (FinishReason.STOP_STRING, num_before - 1)
    assert finished.timings.num_retractions == 1
    assert len(younger.token_ids) == num_before, "something followed the terminal event"


def test_a_deadline_that_passes_at_prefill_ends_a_retracted_request() -> None:
    scripted, younger = two_that_do_not_fit()
    step_until_it_waits_for_prefill(scripted)
    scripted.refuse("younger", RowFailure.DEADLINE, retryable=False)
    scripted.run()
    assert isinstance(younger.error, DeadlineExceeded)


# ---- the return of a retracted request ------------------------------------------------------------------------------


def lose_its_handoffs(scripted: ScriptedEngine, clock: Clock, times: int) -> None:
    for _ in range(times):
        clock.now_s += 1
        step_until(scripted, lambda: "younger" in scripted.handoffs, hands_over=False)
        scripted.refuse("younger", RowFailure.COMPUTE)
        scripted.step()


@broken_by(retraction.losses_are_counted_for_ever, "it failed|not there")
def check_a_handoff_that_succeeded_forgives_those_that_failed() -> None:
    """Three handoffs in a row may fail. Here two fail before the retraction and two after it, with a successful one in
    between.
    """
    clock = Clock()
    scripted, younger = two_that_do_not_fit(clock=clock)
    lose_its_handoffs(scripted, clock, 2)
    clock.now_s += 1
    step_until_it_waits_for_prefill(scripted)
    lose_its_handoffs(scripted, clock, 2)
    clock.now_s += 1
    scripted.run()
    assert younger.token_ids == younger.expected, f"it failed: {younger.error}"
    assert younger.finished is not None
    timings = younger.finished.timings
    assert (timings.num_handoff_attempts, timings.num_retractions) == (6, 1)


def test_a_retracted_request_whose_handoffs_all_fail_ends_with_their_error() -> None:
    clock = Clock()
    scripted, younger = two_that_do_not_fit(clock=clock)
    step_until_it_waits_for_prefill(scripted)
    num_before = len(younger.token_ids)
    lose_its_handoffs(scripted, clock, 3)
    scripted.run()
    assert isinstance(younger.error, EngineFault) and "planted" in str(younger.error)
    assert younger.token_ids == younger.expected[:num_before], "what was delivered stays"


@broken_by(retraction.waiting_for_slots_counts_as_refused, "refused twice")
def check_waiting_for_slots_is_no_refusal() -> None:
    """A request is refused once, waits long for free slots in the decode service, and is refused again. It must still
    be retried.
    """
    clock = Clock()
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=48, clock=clock)
    older = scripted.submit("older", OLDER, 40)
    scripted.start("older")
    younger = scripted.submit("younger", [4] * 6, 8)
    step_until(scripted, lambda: len(older.token_ids) >= 12, hands_over=False)
    scripted.refuse("younger", RowFailure.CAPACITY)
    scripted.step()
    while not older.has_ended:
        clock.now_s += 1
        scripted.step()
        assert "younger" not in scripted.handoffs, "there were slots for it"
    step_until(scripted, lambda: "younger" in scripted.handoffs, hands_over=False)
    scripted.refuse("younger", RowFailure.CAPACITY)
    scripted.step()
    clock.now_s += 1
    assert not younger.has_ended, "it was refused twice, a quarter of a second each"
    scripted.run()
    assert younger.token_ids == younger.expected


def test_a_replica_that_comes_refuses_and_goes_is_not_waited_for_without_end() -> None:
    """Time without any replica counts towards the time limit, however many slots the pool has free."""
    clock = Clock()
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=48, clock=clock)
    only = scripted.submit("only", OLDER, 8)
    here, gone = (ReplicasChanged((Replica(REPLICA, is_ready=is_ready),)) for is_ready in (True, False))
    began_s = clock.now_s
    while not only.has_ended:
        assert clock.now_s < began_s + 40, "waited for without end"
        scripted.post(here)
        step_until(scripted, lambda: "only" in scripted.handoffs or only.has_ended, hands_over=False)
        if not only.has_ended:
            scripted.refuse("only", RowFailure.DRAINING)
        scripted.post(gone)
        scripted.step()
        clock.now_s += 8
    assert isinstance(only.error, PrefillUnavailable)


def test_refusals_of_a_retracted_request_are_bounded_by_time() -> None:
    clock = Clock()
    scripted, younger = two_that_do_not_fit(clock=clock)
    step_until_it_waits_for_prefill(scripted)
    began_s = clock.now_s
    while not younger.has_ended:
        assert clock.now_s < began_s + 20, "refused for ever"
        if "younger" in scripted.handoffs:
            scripted.refuse("younger", RowFailure.DRAINING)
        scripted.step()
        clock.now_s += 0.1
    assert isinstance(younger.error, PrefillUnavailable)
    assert clock.now_s - began_s >= 9
    scripted.run()


@broken_by(retraction.a_request_put_off_has_no_place, "took its slots")
def check_a_request_put_off_keeps_its_place() -> None:
    """While a refused request waits for its retry, no younger one gets the slots that it will need."""
    clock = Clock()
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=60, clock=clock)
    refused = scripted.submit("refused", [1] * 20, 20)
    scripted.step()
    scripted.refuse("refused", RowFailure.CAPACITY)
    scripted.step()
    young = scripted.submit("young", [2] * 20, 20)
    events = scripted.step()
    assert not any(isinstance(event, StartHandoff) for event in events), "a younger request took its slots"
    clock.now_s += 1
    scripted.step()
    assert list(scripted.handoffs) == ["refused"]
    scripted.run()
    for outcome in (refused, young):
        assert outcome.token_ids == outcome.expected


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
