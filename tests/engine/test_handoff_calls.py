from __future__ import annotations

import pytest

from common.errors import ContextExceeded, PrefillUnavailable
from decode_service import dispatcher
from decode_service.messages import Event, Replica, ReplicasChanged, StartHandoff
from tests.engine.harness import ScriptedEngine


def test_more_rows_than_a_call_may_have_are_asked_for_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_CALL_ROWS", 2)
    engine = ScriptedEngine(max_rows=8)
    outcomes = [engine.submit(name, [number], 3) for number, name in enumerate("abcde", 1)]
    engine.step()
    calls = [handoff.call_id for handoff in engine.handoffs.values()]
    assert [calls.count(call) for call in dict.fromkeys(calls)] == [2, 2, 1]
    engine.run()
    assert [outcome.token_ids for outcome in outcomes] == [outcome.expected for outcome in outcomes]


SMALL, LARGE = Replica("small", True, max_context_tokens=8), Replica("large", True, 5, max_context_tokens=40)
LOST = Replica("large", False, error=PrefillUnavailable("large: is not ready"))
SHORT, LONG = [1, 2, 3], list(range(1, 21))


def places(events: list[Event]) -> dict[str, str]:
    """Where each request was sent."""
    return {row.request_id: each.replica for each in events if isinstance(each, StartHandoff) for row in each.rows}


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


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_prompt_waits_for_a_replica_that_may_take_it_and_holds_up_no_other(comes_back: bool) -> None:
    now_s = [100.0]
    engine = ScriptedEngine(max_kv_tokens=24, clock=lambda: now_s[0])
    engine.post(ReplicasChanged((SMALL, LOST)))
    long = engine.submit("long", LONG, 3)
    engine.submit("short", SHORT, 3)
    assert places(engine.step()) == {"short": "small"}
    engine.hand_over("short")
    now_s[0] += 9.0
    engine.step()
    assert long.error is None
    if comes_back:
        engine.post(ReplicasChanged((SMALL, LARGE)))
    else:
        now_s[0] += 1.0
        engine.step()
        assert isinstance(long.error, PrefillUnavailable)
        assert str(long.error).endswith("the largest takes 8, and large: large: is not ready")
    engine.run()
    assert comes_back == (long.error is None)


def test_clients_get_rows_in_turn_and_one_alone_as_they_come() -> None:
    engine = ScriptedEngine(max_rows=3)
    for name in ("a1", "a2", "a3", "a4", "a5"):
        engine.submit(name, [1], 3, client="a")
    assert list(places(engine.step())) == ["a1", "a2", "a3"]
    for name in ("b1", "b2", "c1"):
        engine.submit(name, [1], 3, client=name[0])
    engine.step()
    order = []
    while len(order) < 5:
        engine.abort(next(iter(engine.handoffs)))
        order += places(engine.step())
    assert order == ["b1", "c1", "a4", "b2", "a5"]
    engine.run()
