from __future__ import annotations

import pytest

from decode_service import dispatcher
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
