"""Tests of the order in which waiting requests get rows: by priority, and by how long they have waited.

`test_retraction_bounds` has the same for requests that give their slots up.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import PrefillUnavailable
from common.priority import Ageing
from decode_service.messages import CallEnded, StartHandoff
from tests.engine.harness import ScriptedEngine

SHORT = [1, 2, 3]
STEP_S = 10.0


class Rows:
    """A decode engine with one row, which a request holds from the start. `next` gives the row to another one, at a
    time that the test sets.
    """

    def __init__(self, *, best_priority: int = 0) -> None:
        self.now_s = 0.0
        self.scripted = ScriptedEngine(
            max_rows=1, clock=lambda: self.now_s, ageing=Ageing(STEP_S), best_priority=best_priority
        )
        self.sent_priorities: dict[str, int] = {}
        self.submit("holder", priority=0)

    def submit(self, *names: str, priority: int, client: str = "") -> None:
        for name in names:
            self.scripted.submit(name, SHORT, 3, priority=priority, client=client)
        self.scripted.step()

    def next(self) -> Sequence[str]:
        """Ends the request that holds the row, and returns those that are handed off after it."""
        for name in list(self.scripted.handoffs):
            self.scripted.abort(name)
        started = [event for event in self.scripted.step() if isinstance(event, StartHandoff)]
        rows = [row for event in started for row in event.rows]
        self.sent_priorities |= {row.request_id: row.priority for row in rows}
        return [row.request_id for row in rows]


def test_a_lower_priority_is_handed_off_earlier_and_equal_ones_by_age() -> None:
    rows = Rows()
    rows.submit("low 1", "low 2", priority=2)
    rows.submit("high 1", "high 2", priority=0)
    rows.submit("middle", priority=1)
    order = [name for _ in range(5) for name in rows.next()]
    assert order == ["high 1", "high 2", "middle", "low 1", "low 2"]


def test_no_flood_of_better_requests_delays_one_for_longer_than_its_ageing() -> None:
    """A request of priority p waits behind those of priority 0 that come in the p * STEP_S seconds after it."""
    rows = Rows()
    rows.submit("low", priority=3)
    order: list[str] = []
    while "low" not in order:
        assert len(order) < 100, "it starves"
        rows.submit(f"high at {rows.now_s}", priority=0)
        order += rows.next()
        rows.now_s += 1.0
    assert order[-2:] == [f"high at {3 * STEP_S - 1}", "low"]


def test_prefill_is_told_what_waiting_has_made_of_the_priority() -> None:
    rows = Rows(best_priority=-1)
    rows.submit("low", priority=4)
    rows.submit("high", priority=-1)
    rows.now_s = 2.5 * STEP_S
    assert [*rows.next(), *rows.next()] == ["high", "low"]
    assert rows.sent_priorities == {"high": -1, "low": 2}


def test_one_that_comes_back_waits_for_better_ones_and_goes_before_its_equals() -> None:
    rows = Rows()
    rows.submit("returns", "equal", priority=1)
    assert rows.next() == ["returns"]
    rows.submit("better", priority=0)
    rows.scripted.post(CallEnded(rows.scripted.handoffs.pop("returns").call_id, PrefillUnavailable("killed")))
    assert rows.next() == ["better"]
    assert [*rows.next(), *rows.next()] == ["returns", "equal"]


def test_clients_take_turns_among_requests_of_one_priority() -> None:
    """Old requests of one client do not become better than new ones of another: waiting makes nobody better than
    `best_priority`.
    """
    rows = Rows()
    rows.submit("a1", "a2", "a3", priority=0, client="a")
    rows.now_s = 5 * STEP_S
    rows.submit("b1", "b2", priority=0, client="b")
    rows.submit("c1", priority=1, client="c")
    assert [name for _ in range(6) for name in rows.next()] == ["a1", "b1", "a2", "b2", "a3", "c1"]
