"""Bounds on retraction: no request starves, for any mix of arrivals and priorities.

Requests 0, 1, 2, ... are in order of arrival, in a pool too small for them. One of priority p is due p *
STEPS_PER_PRIORITY steps after its arrival, so where all have one priority, the first that is due is the oldest:
- A retracted request is due after all that keep their slots. So the first that is due is never retracted.
- No request is handed off while one of a better level waits, or one of its level that is due before it. A retracted
  request returns with its prompt and all its output.
- Request k is retracted at most as often as requests that are due before it were there at the same time: between two
  retractions one of them must have ended, since the slots of the others only grow, or a new one must have come. So no
  two requests retract each other for ever.
- A handoff commits at least one token, unless it is retracted before it is complete.
- Request k ends within 2 * tokens + handoffs * (D + 4) steps, where D is the length of the longest handoff in steps.
  Tokens and handoffs are those of k and of the requests at the same time that are older or due before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import Phase as Part
from hypothesis import given, settings
from hypothesis import strategies as st

from common.priority import Ageing
from decode_service.messages import Phase, StartHandoff
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import Outcome, ScriptedEngine
from tests.engine.mutants import retraction
from tests.engine.speculating import CHAIN, TREE

MAX_STEPS = 500
STEPS_PER_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives `gap` steps after the previous one. Each of its handoffs takes `handoff_steps`."""

    gap: int
    num_prompt_tokens: int
    max_tokens: int
    handoff_steps: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Life:
    arrivals: tuple[Arrival, ...]
    max_rows: int
    max_kv_tokens: int
    overlap: bool = True
    spec_info: SpecInfo | None = None


@dataclass(slots=True)
class Seen:
    """The history of one request, as the watcher recorded it."""

    arrival: Arrival
    outcome: Outcome
    born: int
    num_retractions: int = 0
    num_handoffs: int = 0
    ended: int | None = None

    @property
    def due(self) -> int:
        return self.born + STEPS_PER_PRIORITY * self.arrival.priority

    def lived_beside(self, other: Seen) -> bool:
        return self.born <= (other.ended or self.born) and other.born <= (self.ended or other.born)


@dataclass
class Watcher:
    """Runs a life (a list of arrivals) step by step, and checks every step."""

    life: Life
    num_steps: int = 0
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        life = self.life
        self.scripted = ScriptedEngine(
            max_rows=life.max_rows,
            max_kv_tokens=life.max_kv_tokens,
            overlap=life.overlap,
            spec_info=life.spec_info,
            debug_checks=False,
            clock=lambda: float(self.num_steps),
            ageing=Ageing(step_s=STEPS_PER_PRIORITY),
        )
        self._due: dict[str, int] = {}

    def live(self) -> None:
        due = 0
        for arrival in self.life.arrivals:
            due += arrival.gap
            while self.num_steps < due:
                self.step()
            self.submit(arrival)
        while any(seen.ended is None for seen in self.seen):
            assert self.num_steps < MAX_STEPS, f"not over: {self.scripted.engine.load()}"
            self.step()
        for seen in self.seen:
            assert seen.outcome.token_ids == seen.outcome.expected, "tokens were lost or repeated"

    def submit(self, arrival: Arrival) -> Seen:
        number = len(self.seen)
        prompt = range(1 + 31 * number, 1 + 31 * number + arrival.num_prompt_tokens)
        outcome = self.scripted.submit(str(number), prompt, arrival.max_tokens, priority=arrival.priority)
        self.seen.append(Seen(arrival, outcome, self.num_steps))
        return self.seen[-1]

    def step(self) -> None:
        delivered = [tuple(seen.outcome.token_ids) for seen in self.seen]
        for name in [name for name, due in self._due.items() if due <= self.num_steps]:
            del self._due[name]
            if name in self.scripted.handoffs:
                self.scripted.hand_over(name)
        events = self.scripted.step()
        self.scripted.landing.run_all()
        self.num_steps += 1
        gave_way = self._note_retractions()
        self._look_at_slots(gave_way)
        handed_off = []
        for event in events:
            for row in event.rows if isinstance(event, StartHandoff) else ():
                number = int(row.request_id)
                seen = self.seen[number]
                assert row.token_ids == (*seen.outcome.prompt, *delivered[number]), "other tokens went to prefill"
                assert row.prompt_len == len(seen.outcome.prompt), "output went to prefill as prompt"
                seen.num_handoffs += 1
                self._due[row.request_id] = self.num_steps + seen.arrival.handoff_steps
                handed_off.append(number)
        self._look_at_the_queue(handed_off, gave_way)
        for seen in self.seen:
            if seen.ended is None and seen.outcome.has_ended:
                seen.ended = self.num_steps

    def _note_retractions(self) -> list[int]:
        gave_way = []
        for name, req in self.scripted.engine.lives.requests.items():
            seen = self.seen[int(name)]
            if req.num_retractions > seen.num_retractions:
                gave_way.append(int(name))
            seen.num_retractions = req.num_retractions
        return gave_way

    def _look_at_slots(self, gave_way: list[int]) -> None:
        if not gave_way:
            return
        keepers = [int(name) for name, req in self.scripted.engine.lives.requests.items() if req.lease is not None]
        first = min((number for number, seen in enumerate(self.seen) if seen.ended is None), key=self._turn)
        assert first not in gave_way, "the first request in turn gave way"
        last_to_stay = min(map(self._turn, gave_way))
        assert all(self._turn(keeper) < last_to_stay for keeper in keepers), (
            f"{gave_way} gave way, {keepers} kept slots"
        )

    def _turn(self, number: int) -> tuple[int, int]:
        return self.seen[number].due, number

    def _look_at_the_queue(self, handed_off: Sequence[int], gave_way: Sequence[int]) -> None:
        def place(number: int) -> tuple[int, tuple[int, int]]:
            arrival, num_waited = self.seen[number].arrival, self.num_steps - 1 - self.seen[number].born
            level = max(0, arrival.priority - num_waited // STEPS_PER_PRIORITY)
            return level, self._turn(number)

        requests = self.scripted.engine.lives.requests
        waiting = {int(name) for name, req in requests.items() if req.phase is Phase.QUEUE} - {*gave_way}
        last = max((place(number) for number in handed_off if number not in gave_way), default=None)
        assert last is None or all(last < place(number) for number in waiting), "a later request overtook"

    def check_bounds(self, of: Sequence[Seen] = ()) -> None:
        """Checks the bounds of the requests in `of`, all of which finished; by default of all requests."""
        longest = max(arrival.handoff_steps for arrival in self.life.arrivals)
        for number, seen in enumerate(of or self.seen):
            older = [other for other in self.seen[:number] if other.lived_beside(seen)]
            newer = [each for each in self.seen[number + 1 :] if each.due < seen.due and each.lived_beside(seen)]
            num_before = sum(other.due <= seen.due for other in older)
            assert seen.num_retractions <= num_before + 2 * len(newer), (
                f"{number} gave way {seen.num_retractions} times"
            )
            finished = seen.outcome.finished
            assert finished is not None and seen.ended is not None
            timings = finished.timings
            assert timings.num_retractions == seen.num_retractions, "retractions are counted wrongly"
            counts = (timings.num_handoff_attempts, seen.num_handoffs, seen.num_retractions + 1)
            assert len(set(counts)) == 1, f"handoffs or retractions are counted wrongly: {counts}"
            concerned = [*older, *newer, seen]
            bound = sum(2 * len(other.outcome.token_ids) for other in concerned) + sum(
                other.num_handoffs * (longest + 4) for other in concerned
            )
            assert seen.ended - seen.born <= bound, f"{number} took {seen.ended - seen.born} steps, more than {bound}"


def lived(life: Life) -> int:
    """Runs the life, checks all bounds, and returns how many retractions there were."""
    watcher = Watcher(life)
    watcher.live()
    watcher.check_bounds()
    return watcher.scripted.engine.load().num_retractions


# ---- random lives -----------------------------------------------------------------------------------------------

arrivals = st.builds(
    Arrival,
    gap=st.sampled_from([0, 1, 6]),
    num_prompt_tokens=st.integers(1, 12),
    max_tokens=st.sampled_from([2, 40, 50]),
    handoff_steps=st.sampled_from([0, 2, 20]),
    priority=st.sampled_from([0, 0, 0, 1, 3]),
)
lives = st.builds(
    Life,
    arrivals=st.lists(arrivals, min_size=3, max_size=8).map(tuple),
    max_rows=st.sampled_from([2, 3, 6]),
    max_kv_tokens=st.sampled_from([68, 90, 120]),
    overlap=st.booleans(),
    spec_info=st.sampled_from([None, None, CHAIN, TREE]),
)


def test_in_any_life_nobody_starves() -> None:
    num_retractions = 0

    @settings(max_examples=12, database=None, derandomize=True, phases=[Part.explicit, Part.generate])
    @given(life=lives)
    def live(life: Life) -> None:
        nonlocal num_retractions
        num_retractions += lived(life)

    live()
    assert num_retractions > 8, "the pools were too large for this test"


# ---- the same lives with a sound and a broken engine ---------------------------------------------------------------

SCARCE = Life(
    arrivals=(
        Arrival(0, 12, 50, 0),
        Arrival(0, 3, 40, 2),
        Arrival(1, 9, 40, 20),
        Arrival(1, 2, 50, 0),
        Arrival(6, 5, 2, 0),
    ),
    max_rows=6,
    max_kv_tokens=90,
)


@broken_by(retraction.oldest_gives_way, "the first request in turn gave way")
@broken_by(retraction.returns_behind_the_others, "overtook|kept slots")
@broken_by(retraction.newcomers_are_handed_off_first, "overtook")
@broken_by(retraction.output_counts_as_prompt, "as prompt")
@broken_by(retraction.output_is_left_behind, "other tokens went to prefill")
@broken_by(retraction.retractions_are_not_counted, "counted wrongly")
def check_the_youngest_gives_way() -> None:
    assert lived(SCARCE) > 2, "nothing gave way"


@broken_by(retraction.priorities_do_not_count, "overtook|kept slots")
def check_the_worst_priority_gives_way() -> None:
    """The oldest request has a worse priority than the others. It is retracted until waiting has made it better."""
    arrivals = (Arrival(0, 3, 40, 0, priority=2), Arrival(1, 3, 40, 0), Arrival(1, 3, 40, 0, priority=1))
    assert lived(Life(arrivals, max_rows=6, max_kv_tokens=90)) > 0, "nothing gave way"


@broken_by(retraction.handoffs_under_way_are_kept, "first|kept slots")
def check_a_handoff_under_way_gives_way() -> None:
    """The handoff takes longer than the older request needs to grow into the slots that admission left free."""
    assert lived(Life((Arrival(0, 4, 50, 0), Arrival(1, 12, 4, 60)), max_rows=2, max_kv_tokens=62)) == 1


@broken_by(retraction.drafts_are_never_given_up, "not over")
def check_a_tree_that_needs_many_slots_comes_to_an_end() -> None:
    """The drafts of one step need slots that only a handoff under way could give up. Those slots would be free again at
    the next step, so the handoff could be retracted again and again.
    """
    wide = SpecInfo(num_steps=6, num_draft_tokens=6, topk=8)
    lived(Life((Arrival(0, 8, 8, 0), Arrival(0, 8, 8, 20)), max_rows=2, max_kv_tokens=55, spec_info=wide))


@broken_by(retraction.newcomers_are_handed_off_first, "overtook")
@broken_by(retraction.returns_behind_the_others, "overtook|kept slots")
def check_a_stream_of_newcomers_delays_nobody() -> None:
    """A new request arrives at every step for as long as the first three live."""
    watcher = _in_a_stream_of_newcomers(priority=0)
    assert watcher.scripted.engine.load().num_retractions > 0, "nothing gave way"


@broken_by(retraction.waiting_improves_nothing, "overtook|kept slots")
def check_a_stream_of_better_newcomers_delays_nobody_who_has_waited() -> None:
    """The newcomers have a better priority than the first three, which waiting makes as good."""
    _in_a_stream_of_newcomers(priority=3)


def _in_a_stream_of_newcomers(*, priority: int) -> Watcher:
    """Runs three requests of `priority`, and one newcomer of priority 0 at each step, until the three have ended."""
    watcher = Watcher(Life((Arrival(0, 4, 44, 0, priority),) * 3, max_rows=4, max_kv_tokens=90))
    first = [watcher.submit(arrival) for arrival in watcher.life.arrivals]
    while any(seen.ended is None for seen in first):
        assert watcher.num_steps < MAX_STEPS, "not over"
        watcher.submit(Arrival(0, 6, 2 + watcher.num_steps % 9, 0))
        watcher.step()
    for number in range(3, len(watcher.seen)):
        watcher.scripted.abort(str(number))
    watcher.scripted.step()
    watcher.check_bounds(first)
    return watcher


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
