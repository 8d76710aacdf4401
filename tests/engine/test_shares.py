"""Tests of how clients share rows and slots: who is next, who gives way, and how long a newcomer waits at most."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.priority import DEFAULT_AGEING
from common.sampling.params import ResolvedSampling
from decode_service.messages import Submit
from decode_service.schedule.handoff_policy import RowNeed
from decode_service.schedule.request import Request
from decode_service.schedule.retraction import Retraction
from decode_service.schedule.waiting_queue import HORIZON_S, OTHERS, Shares
from tests.engine.harness import Outcome, ScriptedEngine, assert_right

STEP_S = 0.1
RECLAIM_S = 1.0
FEW_STEPS_S = 0.6
"""A handoff and the steps around it."""
LONG = 56
"""Output tokens of a request that holds its row for much longer than anybody should wait."""


class Contest:
    """A decode engine, and clients that always have so many requests open, each with so many tokens of output. A client
    is named with its tenant, as CLIENT/TENANT, if it has some.
    """

    def __init__(
        self,
        *,
        max_rows: int = 2,
        max_kv_tokens: int = 1024,
        weights: Mapping[str, float] | None = None,
        reclaim_after_s: float = RECLAIM_S,
        step_s: float = STEP_S,
        priority: int = 0,
    ) -> None:
        self.now_s, self._step_s, self._priority = 0.0, step_s, priority
        self.scripted = ScriptedEngine(
            max_rows=max_rows,
            max_kv_tokens=max_kv_tokens,
            client_weights=weights or {},
            reclaim_after_s=reclaim_after_s,
            debug_checks=False,
            clock=lambda: self.now_s,
        )
        self._numbers = itertools.count()
        self._kept: dict[str, tuple[int, int]] = {}
        self._open: dict[str, list[Outcome]] = {}
        self._all: defaultdict[str, list[Outcome]] = defaultdict(list)

    def keep_open(self, client: str, num_open: int, num_output: int) -> None:
        self._kept[client] = (num_open, num_output)

    def submit(self, client: str, num_output: int, *, num_prompt: int = 2) -> Outcome:
        number = next(self._numbers)
        prompt = [1 + (number + place) % 50 for place in range(num_prompt)]
        of, _, tenant = client.partition("/")
        outcome = self.scripted.submit(
            f"{client} {number}", prompt, num_output, client=of, tenant=tenant, priority=self._priority
        )
        self._open.setdefault(client, []).append(outcome)
        self._all[client].append(outcome)
        return outcome

    def step(self) -> None:
        for client, (num_open, num_output) in self._kept.items():
            for _ in range(num_open - len(self._open.setdefault(client, []))):
                self.submit(client, num_output)
            self._open[client] = [each for each in self._open[client] if not each.has_ended]
        self.scripted.step_and_hand_over()
        self.scripted.landing.run_all()
        self.now_s += self._step_s

    def run(self, seconds: float) -> Counter[str]:
        """Returns how many tokens of output each client got."""
        before = self._tokens()
        for _ in range(round(seconds / self._step_s)):
            self.step()
        return Counter({client: num - before[client] for client, num in self._tokens().items()})

    def seconds_until(self, outcome: Outcome, *, num_tokens: int = 1) -> float:
        since_s = self.now_s
        while len(outcome.token_ids) < num_tokens:
            assert outcome.error is None and self.now_s < since_s + 100, "it starves"
            self.step()
        return self.now_s - since_s

    def finish(self) -> None:
        """Aborts what is open, and checks all tokens that came."""
        for name, outcome in self.scripted.outcomes.items():
            if not outcome.has_ended:
                self.scripted.abort(name)
        self.scripted.run()
        assert_right(*self.scripted.outcomes.values())

    def _tokens(self) -> Counter[str]:
        return Counter({client: sum(len(each.token_ids) for each in every) for client, every in self._all.items()})


def test_a_request_that_gives_way_counts_once() -> None:
    """It lost its row in the last step, whose batch still lists it, and was handed over again at once. What it holds is
    not enough for the newcomer.
    """
    submits = [Submit(name, (1,), 1, ResolvedSampling(seed=0, max_tokens=9), client=name) for name in ("greedy", "new")]
    req, new = (Request.of(submit, arrival=number, now_s=0.0) for number, submit in enumerate(submits))
    req.lease = cast(Any, SimpleNamespace(num_tokens=8))
    free = SimpleNamespace(gives_way=lambda *_: True, standing=lambda _: 0.0, gives=lambda *_: None)
    retraction = Retraction(
        pool=cast(Any, SimpleNamespace(num_cached=lambda *_, **__: 0, has_room=lambda *_, leaving, **__: leaving[1:])),
        rows=cast(Any, None),
        lives=cast(Any, SimpleNamespace(bringing_kv={req: None})),
        shares=cast(Any, SimpleNamespace(copy=lambda: free)),
        level=lambda *_: 0,
        reclaim_after_s=1.0,
        clock=lambda: 10.0,
    )
    need = RowNeed(new, 16, None, is_received=True, num_spared_rows=0, num_spared=0)
    retraction.make_way(cast(Any, SimpleNamespace(reqs=[req])), [need])
    assert retraction.num_retractions == 0


# ---- a newcomer's wait -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_greedy", [1, 3])
@pytest.mark.parametrize(
    "sizes",
    [{"max_rows": 8}, {"max_rows": 8, "max_kv_tokens": 160}, {"max_rows": 64, "max_kv_tokens": 512}],
    ids=["rows are short", "slots are short", "64 rows, slots are short"],
)
@pytest.mark.parametrize("weights", [None, {"greedy 0": 5, OTHERS: 1}], ids=["", "weights"])
def test_a_newcomer_is_served_soon(num_greedy: int, sizes: dict[str, int], weights: dict[str, float] | None) -> None:
    """However much others have asked for, before and after it."""
    contest = Contest(**sizes, weights=weights)
    for number in range(num_greedy):
        contest.keep_open(f"greedy {number}", sizes["max_rows"] + 4, LONG)
    contest.run(4.0)
    for num_prompt in (1, 16, 2):
        first = contest.submit("newcomer", 3, num_prompt=num_prompt)
        assert contest.seconds_until(first) <= RECLAIM_S + FEW_STEPS_S
        contest.run(1.0)
    contest.finish()


def test_a_newcomer_whose_weight_is_worth_less_than_a_row_is_served_as_soon() -> None:
    contest = Contest(max_rows=8, weights={"greedy": 20, OTHERS: 1})
    contest.keep_open("greedy", 12, LONG)
    contest.run(4.0)
    for newcomer in ("newcomer", "another"):
        assert contest.seconds_until(contest.submit(newcomer, 3)) <= RECLAIM_S + FEW_STEPS_S
        contest.run(1.0)
    contest.finish()


def test_more_clients_than_rows_take_turns_of_twenty_seconds() -> None:
    num_rows, num_clients, step_s = 2, 3, 0.5
    contest = Contest(max_rows=num_rows, step_s=step_s)
    for number in range(num_clients):
        contest.keep_open(f"greedy {number}", 2, LONG)
    contest.run(30.0)
    waited_s = contest.seconds_until(contest.submit("newcomer", 3))
    assert waited_s <= -(-num_clients // num_rows) * HORIZON_S + 6 * step_s
    tokens = contest.run(120.0)
    del tokens["newcomer"]
    assert min(tokens.values()) > 0.7 * max(tokens.values()), tokens
    assert contest.scripted.engine.load().num_retractions <= num_rows * contest.now_s / HORIZON_S
    last_held_s = dict.fromkeys(tokens, contest.now_s)
    longest_s = 0.0
    for _ in range(200):
        contest.step()
        last_held_s.update((req.client, contest.now_s) for req in contest.scripted.engine.lives.holding)
        longest_s = max(longest_s, contest.now_s - min(last_held_s.values()))
    assert longest_s <= 2 * HORIZON_S + 6 * step_s
    contest.finish()


def test_a_newcomer_of_a_worse_priority_waits_until_it_is_as_good_as_those_before_it() -> None:
    contest = Contest(priority=1)
    contest.keep_open("greedy", 8, LONG)
    contest.run(20.0)
    waited_s = contest.seconds_until(contest.submit("newcomer", 3))
    assert RECLAIM_S + FEW_STEPS_S < waited_s <= DEFAULT_AGEING.step_s + RECLAIM_S + FEW_STEPS_S
    contest.finish()


def test_the_client_that_holds_most_gives_way_when_slots_run_out() -> None:
    contest = Contest(max_rows=8, max_kv_tokens=144)
    for _ in range(4):
        contest.submit("greedy", LONG)
    contest.run(1.0)
    newcomer = contest.submit("newcomer", 30)
    contest.seconds_until(newcomer)
    assert contest.scripted.engine.load().num_retractions == 0
    contest.seconds_until(newcomer, num_tokens=30)
    assert contest.scripted.engine.load().num_retractions > 0, "slots did not run out"
    contest.finish()
    assert newcomer.finished is not None and newcomer.finished.timings.num_retractions == 0


def test_without_reclaiming_it_waits_until_a_row_falls_free() -> None:
    contest = Contest(reclaim_after_s=0.0)
    contest.keep_open("greedy", 8, LONG)
    contest.run(1.0)
    waited_s = contest.seconds_until(contest.submit("newcomer", 3))
    assert LONG * STEP_S / 2 < waited_s <= LONG * STEP_S + FEW_STEPS_S
    contest.finish()
    assert contest.scripted.engine.load().num_retractions == 0


def test_nobody_gives_way_to_a_client_that_holds_as_much() -> None:
    contest = Contest(max_rows=4)
    contest.keep_open("first", 6, LONG)
    contest.run(1.0)
    contest.keep_open("second", 6, LONG)
    contest.run(10.0)
    assert 2 <= contest.scripted.engine.load().num_retractions <= 3, "they take each other's rows again and again"
    contest.keep_open("third", 6, LONG)
    contest.run(20.0)
    assert contest.scripted.engine.load().num_retractions <= 8, "the fourth row goes from one to the next"
    contest.finish()


def test_a_large_request_and_small_ones_of_others_hold_each_other_up_for_a_while_only() -> None:
    """The large one takes more than half of the slots."""
    contest = Contest(max_rows=8, max_kv_tokens=128)
    contest.keep_open("small", 6, 12)
    contest.run(5.0)
    large = contest.submit("large", 8, num_prompt=50)
    tokens = contest.run(4.0)
    assert tokens["small"] > 50
    assert contest.seconds_until(large) < 20
    assert contest.run(4.0)["small"] > 50
    contest.finish()


def test_one_that_comes_back_has_its_place_among_its_own_clients() -> None:
    contest = Contest(max_rows=4, max_kv_tokens=96)
    contest.keep_open("greedy", 6, LONG)
    while not contest.scripted.engine.load().num_retractions:
        contest.step()
    assert contest.seconds_until(contest.submit("newcomer", 3)) <= RECLAIM_S + FEW_STEPS_S
    contest.finish()


# ---- tenants of a client -----------------------------------------------------------------------------------------


def test_a_new_tenant_is_served_as_soon_as_a_new_client() -> None:
    contest = Contest(max_rows=4, max_kv_tokens=160)
    contest.keep_open("gateway/greedy", 8, LONG)
    contest.keep_open("other", 8, LONG)
    contest.run(4.0)
    for newcomer in ("gateway/new", "gateway", "third/new"):
        assert contest.seconds_until(contest.submit(newcomer, 3)) <= RECLAIM_S + FEW_STEPS_S
        contest.run(1.0)
    contest.finish()


def test_a_client_gets_no_more_for_having_many_tenants() -> None:
    contest = Contest(max_rows=4)
    for number in range(10):
        contest.keep_open(f"many/{number}", 1, 12)
    contest.keep_open("one", 8, 12)
    tokens = contest.run(60.0)
    mine = [tokens[f"many/{number}"] for number in range(10)]
    assert 0.8 < sum(mine) / tokens["one"] < 1.25, tokens
    assert min(mine) > 0.6 * max(mine), tokens
    contest.finish()


# ---- over time -------------------------------------------------------------------------------------------------------


def test_clients_hold_equal_parts_whatever_their_requests_are() -> None:
    contest = Contest()
    contest.keep_open("long", 4, 24)
    contest.keep_open("short", 4, 4)
    tokens = contest.run(30.0)
    assert 0.7 < tokens["short"] / tokens["long"] < 1.2, tokens  # a short one spends more of its time on its handoff
    contest.finish()


@pytest.mark.parametrize("max_rows", [1, 2, 8])
def test_clients_are_served_in_proportion_to_their_weights(max_rows: int) -> None:
    contest = Contest(max_rows=max_rows, weights={"a": 3, OTHERS: 1})
    for client in "ab":
        contest.keep_open(client, 2 * max_rows, 6)
    contest.run(40.0)
    tokens = contest.run(80.0)
    assert 2.6 < tokens["a"] / tokens["b"] < 3.4, tokens
    contest.finish()


def test_a_client_that_asked_for_nothing_has_saved_nothing_up() -> None:
    contest = Contest()
    contest.keep_open("a", 4, 8)
    contest.keep_open("b", 4, 8)
    contest.run(10.0)
    contest.keep_open("b", 0, 8)
    contest.run(30.0)
    contest.keep_open("b", 4, 8)
    tokens = contest.run(10.0)
    assert 0.7 < tokens["b"] / tokens["a"] < 1.4, tokens
    contest.finish()


def holder(client: str, tenant: str = "") -> Any:
    return SimpleNamespace(sharer=(client, tenant), lease=SimpleNamespace(num_tokens=1))


@pytest.mark.parametrize(("held_s", "gives_way"), [(0.5 * HORIZON_S, False), (2.0 * HORIZON_S, True)])
def test_parts_that_are_too_coarse_for_all_are_held_in_turn(held_s: float, gives_way: bool) -> None:
    shares = Shares({}, max_rows=2, num_slots=100)
    shares.begin_to_wait(("new", ""))
    shares.look([holder("old")], 0.0)
    shares.look([holder("old")], held_s)
    assert shares.gives_way(("old", ""), 1, ("new", ""), 1) == gives_way


def test_a_row_that_a_copy_gives_is_still_held() -> None:
    shares = Shares({}, max_rows=2, num_slots=100)
    shares.look([holder("client")], 0.0)
    copied, before = shares.copy(), shares.standing(("client", ""))
    copied.gives(("client", ""), 1)
    assert copied.standing(("client", "")) < before == shares.standing(("client", ""))


def test_what_a_tenant_held_counts_among_its_client_s() -> None:
    shares = Shares({}, max_rows=2, num_slots=100)
    for tenant in ("a", "b"):
        shares.begin_to_wait(("client", tenant))
    shares.look([holder("client", "a")], 0.0)
    shares.look([], 10.0)
    (of_client, of_a), (same, of_b) = (shares.standing(("client", tenant)) for tenant in ("a", "b"))
    assert of_client == same and of_a > of_b


def test_the_charges_of_clients_that_left_are_bounded() -> None:
    shares = Shares({}, max_rows=1, num_slots=100)
    for number in range(2000):
        client = str(number)
        shares.begin_to_wait((client, ""))
        shares.end_to_wait((client, ""))
        shares.look([holder(client)], float(number))
    assert shares.num_charges <= 1025


def test_newcomers_do_not_pass_one_that_waits_for_ever() -> None:
    shares = Shares({}, max_rows=1, num_slots=100)
    for client in ("busy", "old"):
        shares.begin_to_wait((client, ""))
    shares.look([holder("old")], 0.0)
    shares.look([], 100.0)
    for number in range(500):
        new = str(number)
        shares.begin_to_wait((new, ""))
        if shares.standing(("old", "")) < shares.standing((new, "")):
            break
        shares.end_to_wait((new, ""))
        shares.look([holder(new)], 100.0 + 2 * number)
        shares.look([], 101.0 + 2 * number)
    else:
        raise AssertionError("it waits for ever")
    assert number > 50, "others have their turns meanwhile"
