from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from common.errors import ContextExceeded, InvalidRequest, PrefillUnavailable, RowFailure
from common.sampling.params import ResolvedSampling
from common.wire.handoff import HandoffRow, PrebuiltBatch, RowFailed
from decode_service.messages import FrameArrived, Replica, ReplicasChanged, StartHandoff, Submit
from decode_service.schedule import dispatcher
from tests.engine.harness import Clock, ScriptedEngine, places
from tests.engine.tags import GROUP, TAG_GRAMMAR


def test_more_rows_than_a_call_may_have_are_asked_for_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_CALL_ROWS", 2)
    engine = ScriptedEngine(max_rows=8)
    outcomes = [engine.submit(name, [number], 3) for number, name in enumerate("abcde", 1)]
    engine.step()
    calls = [handoff.call_id for handoff in engine.handoffs.values()]
    assert [calls.count(call) for call in dict.fromkeys(calls)] == [2, 2, 1]
    engine.run()
    assert [outcome.token_ids for outcome in outcomes] == [outcome.expected for outcome in outcomes]


def test_rows_of_more_bytes_than_a_call_may_have_are_asked_for_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(max_rows=8, max_kv_tokens=512)
    for number, name in enumerate("abcde", 1):
        engine.submit(name, [number] * 30, 3)
    row = HandoffRow("a", 0, (1,) * 30, 30, ResolvedSampling(seed=0, max_tokens=3))
    monkeypatch.setattr(dispatcher, "MAX_CALL_BYTES", 2 * row.most_bytes)
    engine.submit("large", [6] * 40, 3)
    engine.step()
    calls = [engine.handoffs[name].call_id for name in (*"abcde", "large")]
    assert [calls.count(call) for call in dict.fromkeys(calls)] == [2, 2, 1, 1]
    engine.run()
    assert all(outcome.token_ids == outcome.expected for outcome in engine.outcomes.values())


def test_rows_of_more_fields_than_a_call_may_have_are_asked_for_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(max_rows=8)
    row = HandoffRow("a", 0, (1,), 1, ResolvedSampling(seed=0, max_tokens=3))
    monkeypatch.setattr(dispatcher, "MAX_CALL_FIELDS", 2 * row.most_fields)
    for number, name in enumerate("abcde", 1):
        engine.submit(name, [number], 3)
    engine.step()
    calls = [engine.handoffs[name].call_id for name in "abcde"]
    assert [calls.count(call) for call in dict.fromkeys(calls)] == [2, 2, 1]


def test_time_at_a_replica_does_not_count_as_refused() -> None:
    clock = Clock()
    engine = ScriptedEngine(clock=clock)
    outcome = engine.submit("a", SHORT, 3)

    def refused_after(seconds: float) -> None:
        engine.step()
        clock.now_s += seconds
        engine.refuse("a", RowFailure.CAPACITY)
        engine.step()
        clock.now_s += 0.25

    for seconds in (0.0, 12.0, 7.0):  # it waits in the replica's queue, and is then refused
        refused_after(seconds)
        assert outcome.error is None
    waited_s = 0.75
    while outcome.error is None:
        refused_after(0.0)
        waited_s += 0.25
    assert isinstance(outcome.error, PrefillUnavailable)
    assert 9.5 <= waited_s <= 10.5, "it fails when it was refused for ten seconds"


def test_a_refused_row_goes_to_another_replica_at_once_and_then_waits() -> None:
    clock = Clock()
    engine = ScriptedEngine(clock=clock)
    engine.post(ReplicasChanged((Replica("one", True), Replica("other", True))))
    engine.submit("a", SHORT, 3)
    first = places(engine.step())["a"]
    engine.refuse("a", RowFailure.CAPACITY)  # for 250 ms
    second = places(engine.step())["a"]
    assert {first, second} == {"one", "other"}
    engine.refuse("a", RowFailure.CAPACITY)
    assert not places(engine.step())
    clock.now_s += 0.25
    assert places(engine.step()) == {"a": first}
    engine.run()


SMALL, LARGE = Replica("small", True, max_context_tokens=8), Replica("large", True, 5, max_context_tokens=40)
LOST = Replica("large", False, error=PrefillUnavailable("large: is not ready"))
SHORT, LONG = [1, 2, 3], list(range(1, 21))


def test_a_prompt_goes_only_where_it_fits() -> None:
    engine = ScriptedEngine()
    engine.post(ReplicasChanged((SMALL, LARGE)))
    engine.submit("long", LONG, 3)
    engine.submit("short", SHORT, 3)
    assert places(engine.step()) == {"long": "large", "short": "small"}
    engine.run()


def test_a_prompt_that_fits_no_replica_is_refused_at_once_by_their_limit() -> None:
    engine = ScriptedEngine()
    engine.post(ReplicasChanged((SMALL, Replica("smaller", True, max_context_tokens=4))))
    long = engine.submit("long", LONG, 3)
    engine.submit("short", SHORT, 3)
    assert places(engine.step()) == {"short": "small"}
    assert isinstance(long.error, ContextExceeded)
    assert str(long.error) == "prompt: 20 tokens are more than any prefill replica takes: the largest takes 8"
    assert long.error.metadata == {"field": "prompt", "max_context_tokens": "8", "num_prompt_tokens": "20"}
    engine.run()


def test_a_request_that_fails_leaves_what_was_spared_for_it_to_the_next() -> None:
    """The only row is spared for a long request that was refused. Then the replica is replaced by one that is too small
    for that request. So the request fails, and the next one gets the row.
    """
    engine = ScriptedEngine(max_rows=1, clock=lambda: 0.0)
    long = engine.submit("long", LONG, 3)
    engine.step()
    engine.refuse("long", RowFailure.CAPACITY)
    engine.submit("short", SHORT, 3)
    for _ in range(2):
        assert not places(engine.step())
    engine.post(ReplicasChanged((SMALL,)))
    engine.step()
    assert isinstance(long.error, ContextExceeded)
    assert places(engine.step()) == {"short": "small"}
    engine.run()


def test_a_change_that_nothing_reports_delays_a_request_by_a_second_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = ScriptedEngine(clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.pool, "reserve", lambda num_tokens, **options: None)
        engine.submit("a", SHORT, 3)
        assert not places(engine.step())
    clock.now_s += 0.9
    assert not places(engine.step())
    clock.now_s += 0.2
    assert list(places(engine.step())) == ["a"]
    engine.run()


OTHERS_MAY_COME = [ReplicasChanged(replicas, others_may_come=True) for replicas in ((SMALL, LARGE), (SMALL,))]


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize(
    ("reports", "cause"),
    [([ReplicasChanged((SMALL, LOST))], ", and large: large: is not ready"), (OTHERS_MAY_COME, "")],
    ids=["lost", "others may come"],
)
def test_a_prompt_waits_for_a_replica_that_may_take_it_and_holds_up_no_other(
    reports: list[ReplicasChanged], cause: str, comes_back: bool
) -> None:
    clock = Clock()
    engine = ScriptedEngine(max_kv_tokens=24, clock=clock)
    for report in reports:
        engine.post(report)
    long = engine.submit("long", LONG, 3)
    engine.submit("short", SHORT, 3)
    assert places(engine.step()) == {"short": "small"}
    engine.hand_over("short")
    clock.now_s += 9.0
    engine.step()
    assert long.error is None
    if comes_back:
        engine.post(replace(reports[-1], replicas=(SMALL, LARGE)))
    else:
        clock.now_s += 1.0
        engine.step()
        assert isinstance(long.error, PrefillUnavailable)
        assert str(long.error).endswith(f"the largest takes 8{cause}")
    engine.run()
    assert comes_back == (long.error is None)


@pytest.mark.parametrize("others_may_come", [True, False])
def test_a_prompt_that_none_has_ever_taken_fails_at_once_behind_others_too(others_may_come: bool) -> None:
    engine = ScriptedEngine(max_rows=1, replicas=ReplicasChanged((SMALL,), others_may_come=others_may_come))
    engine.submit("running", SHORT, 3)
    engine.step()
    for name in ("first", "second"):
        engine.submit(name, SHORT, 3)
    long = engine.submit("long", LONG, 3)
    engine.step()
    assert isinstance(long.error, ContextExceeded)
    engine.run()


def test_a_retracted_request_waits_too_where_one_that_takes_it_may_come() -> None:
    clock = Clock()
    engine = ScriptedEngine(max_rows=2, max_kv_tokens=48, clock=clock)
    engine.submit("older", SHORT, 40)
    younger = engine.submit("younger", SHORT, 40)
    while not engine.engine.load().num_retractions:
        engine.step_and_hand_over()
        engine.landing.run_all()
    engine.post(ReplicasChanged((SMALL,), others_may_come=True))
    for _ in range(3):
        engine.step()
        clock.now_s += 3.0
    assert younger.error is None
    engine.post(ReplicasChanged((SMALL, LARGE), others_may_come=True))
    engine.run()
    assert younger.token_ids == younger.expected


def test_a_prompt_that_no_replica_takes_waits_no_longer_while_others_wait_for_rows() -> None:
    clock = Clock()
    engine = ScriptedEngine(max_rows=1, clock=clock)
    engine.post(ReplicasChanged((SMALL, Replica("large", False))))
    long = engine.submit("long", LONG, 3)
    for name in ("short", "shorter"):
        engine.submit(name, SHORT, 3)
    for since_s in range(10):
        engine.step()
        assert long.error is None, f"after {since_s} s"
        clock.now_s += 1.0
    engine.step()
    assert isinstance(long.error, PrefillUnavailable)
    assert str(long.error).endswith("the largest takes 8, and large: is not ready")
    engine.run()


def submit_all(engine: ScriptedEngine, names: str) -> None:
    """Submits a request for each name. The name's first letter is its client."""
    for name in names.split():
        engine.submit(name, SHORT, 3, client=name[0])


def sent_after(engine: ScriptedEngine, *, num_freed: int) -> list[str]:
    """Aborts `num_freed` requests that hold rows, steps once, and returns the requests sent to prefill in that step."""
    for name in list(engine.handoffs)[:num_freed]:
        engine.abort(name)
    return list(places(engine.step()))


@pytest.mark.parametrize(
    ("num_freed", "expected"),
    [
        pytest.param(1, "b1 c1 a5 b2 a6 b3 a7 b4", id="1"),
        pytest.param(2, "b1 c1 a5 b2 a6 b3 a7 b4", id="2"),
        pytest.param(4, "a5 b1 c1 a6 b2 a7 b3 b4", id="4"),
    ],
)
def test_the_client_that_holds_least_is_next_however_many_rows_come_free_at_a_time(
    num_freed: int, expected: str
) -> None:
    """Clients that hold as much take turns."""
    engine = ScriptedEngine(max_rows=4, clock=Clock())
    submit_all(engine, "a1 a2 a3 a4 a5 a6 a7")
    assert sent_after(engine, num_freed=0) == ["a1", "a2", "a3", "a4"], "one alone has all, by age"
    submit_all(engine, "b1 b2 c1 b3 b4")
    order = [name for _ in range(8 // num_freed) for name in sent_after(engine, num_freed=num_freed)]
    assert order == expected.split()
    engine.run()


def test_a_client_has_its_turn_however_many_others_come_meanwhile() -> None:
    """Each newcomer has two requests. None gets its second row before the first client has its second one."""
    engine = ScriptedEngine(max_rows=2, clock=Clock())
    submit_all(engine, "a1 b1")
    sent_after(engine, num_freed=0)
    submit_all(engine, "c1 c2")
    order = []
    for number in range(6):
        engine.submit(f"{number}x", SHORT, 3, client=f"newcomer {number}")
        engine.submit(f"{number}y", SHORT, 3, client=f"newcomer {number}")
        engine.abort(list(engine.handoffs)[-1])  # the first one keeps its row
        order += places(engine.step())
    assert order == ["c1", "0x", "c2", "1x", "0y", "2x"]
    engine.run()


def test_one_that_is_asked_for_again_goes_before_all_clients_that_have_had_no_row() -> None:
    engine = ScriptedEngine(max_rows=3)
    submit_all(engine, "a1 b1 b2 a2 c1")
    assert sent_after(engine, num_freed=0) == ["a1", "b1", "c1"]
    for name in ("c1", "b1"):
        engine.refuse(name, RowFailure.COMPUTE)
    assert sent_after(engine, num_freed=0) == ["b1", "c1"], "by age"
    assert sent_after(engine, num_freed=3) == ["a2", "b2"]
    engine.run()


def test_one_that_fits_no_replica_costs_its_client_no_turn() -> None:
    engine = ScriptedEngine(max_rows=1)
    engine.post(ReplicasChanged((SMALL, LOST)))
    engine.submit("a1", LONG, 3, client="a")
    submit_all(engine, "a2 a3 b1")
    order = sent_after(engine, num_freed=0)
    for _ in range(2):
        order += sent_after(engine, num_freed=1)
    assert order == ["a2", "b1", "a3"]
    engine.post(ReplicasChanged((SMALL, LARGE)))
    assert sent_after(engine, num_freed=1) == ["a1"]
    engine.run()


def test_a_row_that_fails_after_its_first_token_came_is_handed_off_again() -> None:
    """The replica fails to copy the rest of the row's KV. The call's other row goes on."""
    engine = ScriptedEngine()
    outcomes = [engine.submit(name, prompt, 3) for name, prompt in (("failed", LONG), ("other", SHORT))]
    engine.step()
    handoff = engine.handoffs["failed"]
    engine.hand_over("failed")
    engine.hold_back(1)  # the second half of its KV
    engine.post(FrameArrived(handoff.call_id, RowFailed(handoff.row, RowFailure.COMPUTE, True, 0, "planted")))
    assert places(engine.step()) == {"failed": "replica"}
    assert engine.engine.load().num_row_retries == 1
    engine.run()
    assert [outcome.token_ids for outcome in outcomes] == [outcome.expected for outcome in outcomes]


@pytest.mark.parametrize("entries", [[[0, 1, 1]], [[0, 1], [1]]], ids=["one frame", "two frames"])
def test_a_second_entry_of_a_row_breaks_the_protocol(entries: list[list[int]]) -> None:
    engine = ScriptedEngine()
    outcomes = [engine.submit(name, [number, 2], 3) for number, name in enumerate("ab")]
    engine.step()
    (call_id,) = {handoff.call_id for handoff in engine.handoffs.values()}
    for rows in entries:
        count = len(rows)
        columns = PrebuiltBatch(
            rows=np.array(rows),
            seq_lens=np.full(count, 2),
            first_token_ids=np.full(count, 1),
            bytes_sent={GROUP.name: np.full(count, 2 * GROUP.token_bytes)},
            queue_s=np.zeros(count),
            compute_s=np.zeros(count),
            num_cached_tokens=np.zeros(count, np.int64),
            first_token_logprobs=(None,) * count,
        )
        engine.post(FrameArrived(call_id, columns))
    engine.step()
    first, second = outcomes
    assert str(second.error) == "the handoff broke the protocol: row 1: a second PrebuiltBatch entry"
    engine.run()
    assert first.token_ids == first.expected


def test_a_grammar_that_a_replica_refuses_is_the_requests_fault() -> None:
    engine = ScriptedEngine()
    outcome = engine.submit("a", SHORT, 3, is_constrained=True)
    engine.step()
    engine.refuse("a", RowFailure.CONSTRAINT, retryable=False)
    engine.step()
    assert isinstance(outcome.error, InvalidRequest)
    assert str(outcome.error) == f"{TAG_GRAMMAR.request_field}: planted"
    engine.run()


def test_what_is_left_of_a_deadline_travels_and_not_the_time_of_day() -> None:
    clock = Clock()
    engine = ScriptedEngine(clock=clock)
    for name, deadline_s in (("none", math.inf), ("later", clock.now_s + 4.0), ("over", clock.now_s - 1.0)):
        engine.post(Submit(name, tuple(SHORT), 3, ResolvedSampling(seed=1, max_tokens=2), deadline_s=deadline_s))
    clock.now_s += 1.5
    rows = [row for event in engine.step() if isinstance(event, StartHandoff) for row in event.rows]
    assert {row.request_id: row.time_left_ms for row in rows} == {"none": 0, "later": 2500, "over": 1}
