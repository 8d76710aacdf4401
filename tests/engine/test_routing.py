"""Tests of the choice of a replica for a row. It goes where it costs least: the tokens that the replica has to compute
for it, and those that wait there before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import PrefillUnavailable, RowFailure
from common.kv.pool import CacheKey
from common.kv.prefix_tree import Prefix, PrefixTree
from decode_service.messages import CallEnded, Replica, ReplicasChanged
from decode_service.schedule import replica_set
from decode_service.schedule.replica_set import ReplicaSet, Route
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import ScriptedEngine, places
from tests.engine.mutants import routing


def there(
    address: str,
    load: int = 0,
    *,
    instance_id: str = "first",
    max_cached: int = 1000,
    num_evicted: int = 0,
    num_free: int = 0,
) -> Replica:
    """Returns a ready replica that still has to compute `load` tokens."""
    return Replica(
        address,
        True,
        load,
        instance_id=instance_id,
        max_cached_tokens=max_cached,
        num_evicted_tokens=num_evicted,
        num_free_slots=num_free,
    )


GONE = Replica("a", False)


def tokens(number: int, size: int = 100) -> list[int]:
    """Returns the first `size` tokens of a text. Each `number` has a text of its own."""
    return [number * 10_000 + position for position in range(size)]


class Router:
    """A set of replicas, and the rows that were sent to them and are not computed yet."""

    def __init__(self, *replicas: Replica, lookahead: int = 0, routes_by_prefix: bool = True) -> None:
        self._replicas = ReplicaSet(now_s=0.0, lookahead=lookahead, routes_by_prefix=routes_by_prefix)
        self._outstanding = Counter[str]()
        self.report(*replicas)

    def report(self, *replicas: Replica) -> None:
        self._replicas.update(ReplicasChanged(replicas), 0.0, num_outstanding=self._outstanding)

    def compute(self) -> None:
        """Lets the replicas compute all rows that were sent to them."""
        self._outstanding.clear()

    def send(self, prompt: list[int], *, salt: str | None = "", avoid: str = "", computes: bool = True) -> Route:
        """Sends a row where it costs least. With `computes`, the replica computes it before the next row is sent."""
        candidates = self._replicas.candidates(avoid=avoid, num_tokens=len(prompt))
        key = None if salt is None else CacheKey(np.array(prompt), salt)
        route = self._replicas.route(candidates, key, num_tokens=len(prompt), num_outstanding=self._outstanding)
        self._replicas.add(route.replica, key)
        if not computes:
            self._outstanding[route.replica] += route.num_uncomputed
        return route

    def could_send(self, prompt: list[int]) -> bool:
        return bool(self._replicas.candidates(avoid="", num_tokens=len(prompt)))

    @property
    def num_known(self) -> Mapping[str, int]:
        return self._replicas.num_known_tokens


def test_a_prompt_goes_where_its_beginning_is() -> None:
    router = Router(there("a"), there("b"))
    assert router.send(tokens(1)) == Route("a", 0, 100)
    assert router.send(tokens(2)) == Route("b", 0, 100), "idle replicas fill evenly"
    assert router.send(tokens(3, 90)).replica == "a"
    assert router.send(tokens(2, 150)) == Route("b", 100, 50)
    assert router.send([*tokens(1, 40), 7, 8]) == Route("a", 40, 2)
    assert router.send(tokens(2, 150)) == Route("b", 149, 1), "one token is computed, for the logits"


@pytest.mark.parametrize("lookahead", [1, 3])
def test_with_a_draft_head_a_prefix_ends_before_the_tokens_that_it_looks_ahead_to(lookahead: int) -> None:
    router = Router(there("a"), there("b"), lookahead=lookahead)
    router.send(tokens(1))
    assert router.send(tokens(1, 150)) == Route("a", 100 - lookahead, 50 + lookahead)
    assert router.send(tokens(1, lookahead)).num_cached == 0, "shorter than what a position needs"


@broken_by(routing.load_counts_nothing, "1 there and 180 before it")
def check_a_prefix_is_weighed_against_the_load_that_the_replica_reports() -> None:
    router = Router(there("a"), there("b"))
    router.send(tokens(1))
    router.report(there("a", load=99), there("b"))
    assert router.send(tokens(1, 120)).replica == "a", "20 there and 99 before it, or 120"
    router.report(there("a", load=180), there("b", load=60))
    assert router.send(tokens(1, 120)).replica == "b", "1 there and 180 before it, or 120 and 60"


def test_rows_that_are_still_being_computed_count_as_load() -> None:
    router = Router(there("a"), there("b"))
    router.send(tokens(1))
    router.send(tokens(2, 60), avoid="b", computes=False)
    assert router.send(tokens(1, 150)).replica == "a", "50 and 60, or 150"
    router.send(tokens(3, 41), avoid="b", computes=False)
    assert router.send(tokens(1, 200)).replica == "a", "50 and 101, or 200"
    assert router.send(tokens(4, 10)).replica == "b"


def test_of_what_a_replica_reports_own_rows_count_no_longer_than_they_are_computed() -> None:
    """A replica's reported load includes rows that were sent from here. It is already old when the next request comes,
    and each replica's report has another age, so rows computed since then are subtracted.
    """
    router = Router(there("a"), there("b"))
    router.send(tokens(1, 300), computes=False)
    router.report(there("a", load=290), there("b"))
    assert router.send(tokens(1, 310), computes=False).replica == "a", "10 and 300, or 310"
    router.compute()
    assert router.send([*tokens(1, 100), *tokens(2)]).replica == "a", "all that it reported was sent from here"
    router.report(there("a", load=290), there("b", load=30))
    assert router.send(tokens(3, 20)).replica == "a", "its report is the old one"
    router.report(there("a", load=160), there("b", load=30))
    assert router.send(tokens(3, 50)).replica == "b", "30 and 160 of other services, or 50 and 30"


@broken_by(routing.replicas_that_are_not_ready_are_chosen, "it is not ready")
def check_only_ready_replicas_are_chosen() -> None:
    router = Router(there("a"), there("b"))
    router.send(tokens(1))
    router.report(GONE, there("b", load=1000))
    assert router.send(tokens(1)).replica == "b", "it is not ready"
    router.report(GONE)
    assert not router.could_send(tokens(1)), "it is not ready"


def test_the_replica_to_avoid_is_chosen_only_if_there_is_no_other() -> None:
    router = Router(there("a"), there("b", load=1000))
    router.send(tokens(1))
    assert router.send(tokens(1), avoid="a").replica == "b"
    router.report(there("a"))
    assert router.send(tokens(1), avoid="a").replica == "a"


def test_a_prompt_goes_only_where_it_fits() -> None:
    router = Router(there("a"), there("b", load=1000))
    router.send(tokens(1))
    router.report(replace(there("a"), max_context_tokens=149), there("b", load=1000))
    assert router.send(tokens(1, 149)).replica == "a"
    assert router.send(tokens(1, 150)).replica == "b"


@broken_by(routing.a_new_process_is_taken_for_the_old_one, "a new process has nothing")
def check_a_new_process_has_nothing() -> None:
    router = Router(there("a"), there("b", load=10))
    router.send(tokens(1))
    router.report(GONE, there("b", load=10))
    router.report(there("a"), there("b", load=10))
    assert router.send(tokens(1)).num_cached == 99, "it is the same process"
    router.report(there("a", instance_id="second"), there("b", load=10))
    assert router.send(tokens(1)).num_cached == 0, "a new process has nothing"


def test_what_a_replica_had_is_forgotten_when_nothing_lists_it_any_more() -> None:
    router = Router(there("a"), there("b", load=10))
    router.send(tokens(1))
    router.report(there("b", load=10))
    assert router.num_known == {"b": 0}
    router.report(there("a"), there("b", load=10))
    assert router.send(tokens(1)).num_cached == 0


@broken_by(routing.evictions_are_not_heard_of, "30 were evicted")
def check_what_a_replica_evicted_is_forgotten() -> None:
    router = Router(there("a", max_cached=200, num_evicted=7))
    router.send(tokens(1))
    router.send(tokens(2))
    router.send(tokens(1))  # a use
    router.report(there("a", max_cached=200, num_evicted=37))
    assert router.send(tokens(2)).num_cached == 70, "30 were evicted since the last report, the oldest from its end"
    assert router.send(tokens(1)).num_cached == 99


def test_what_was_evicted_to_make_room_is_not_evicted_again_when_the_replica_reports_it() -> None:
    router = Router(there("a", max_cached=200))
    for number in range(1, 6):
        router.send(tokens(number), computes=False)
    router.report(there("a", max_cached=200))  # another replica's load changed
    router.report(there("a", max_cached=200, num_evicted=100))
    assert router.num_known == {"a": 200}
    router.report(there("a", max_cached=200, num_evicted=300))
    assert router.num_known == {"a": 200}, "it evicts for the last ones later"
    router.compute()
    router.report(there("a", max_cached=200, num_evicted=350))
    assert router.num_known == {"a": 150}, "that was for others"


@broken_by(routing.rows_never_end, "800 were evicted for others")
def check_room_made_for_a_row_that_ended_is_forgotten() -> None:
    """The replica evicted nothing for rows that it refused. So what it evicts later is for other services."""
    router = Router(there("a"))
    for number in range(1, 101):
        router.send(tokens(number))
    router.report(there("a", load=1))
    router.report(there("a", num_evicted=800))
    assert router.num_known == {"a": 200}, "800 were evicted for others"


def test_a_report_that_another_replicas_caused_ends_no_wait_for_evictions() -> None:
    router = Router(there("a", max_cached=200), there("b", load=1000))
    for number in range(1, 6):
        router.send(tokens(number))
    for load in range(3):
        router.report(there("a", max_cached=200), there("b", load=1000 + load))
    router.report(there("a", max_cached=200, num_evicted=300), there("b", load=1000))
    assert router.num_known["a"] == 200, "it had evicted them before it computed the last row"


@broken_by(routing.all_evicted_tokens_were_sent_from_here, "100 of 400 give up a quarter")
def check_of_what_a_replica_evicts_only_a_share_was_handed_to_it_from_here() -> None:
    """Other decode services fill the replica's cache too. So only a share of the tokens that it evicts is counted as
    sent from here.
    """
    router = Router(there("a", max_cached=400))
    router.send(tokens(1))
    router.report(there("a", max_cached=400, num_evicted=30))
    assert router.num_known == {"a": 92}, "100 of 400 give up a quarter of 30, and rather one more than one fewer"
    num_evicted = 30
    for number in range(2, 200):
        router.send(tokens(number, 20))
        num_evicted += 80  # the other three services had as many
        router.report(there("a", max_cached=400, num_evicted=num_evicted))
    assert 60 <= router.num_known["a"] <= 100


def test_salts_share_nothing_and_without_a_cache_only_the_load_counts() -> None:
    router = Router(there("a", load=1), there("b", load=2))
    router.send(tokens(1))
    assert router.send(tokens(1), salt="other").num_cached == 0
    assert router.send(tokens(1), salt=None) == Route("a", 0, 100)
    router.report(there("a", load=3), there("b", load=2))
    before = router.num_known
    assert router.send(tokens(1), salt=None) == Route("b", 0, 100)
    assert router.num_known == before, "it leaves nothing"


@pytest.mark.parametrize("max_cached", [250, 0])
def test_no_more_is_known_than_a_replica_can_keep(max_cached: int) -> None:
    router = Router(there("a", max_cached=max_cached))
    for number in range(1, 20):
        router.send(tokens(number))
        assert router.num_known["a"] <= max_cached
    assert router.num_known["a"] == max_cached
    assert router.send(tokens(19)).num_cached == min(max_cached, 99), "the newest stays"
    assert router.send(tokens(1)).num_cached == 0


def test_what_is_known_takes_bounded_memory_however_much_a_replica_says_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_set, "MAX_KNOWN_TOKENS", 150)
    router = Router(there("a", max_cached=1 << 60))
    for number in range(1, 20):
        router.send(tokens(number))
    assert router.num_known == {"a": 150}


def test_a_burst_with_one_beginning_is_spread_once_its_queue_costs_more_than_the_beginning() -> None:
    router = Router(there("a"), there("b"))
    shared = tokens(1)
    router.send(shared)
    routes = [router.send([*shared, *tokens(number, 10)], computes=False) for number in range(2, 42)]
    places = [route.replica for route in routes]
    assert places[:12] == ["a"] * 11 + ["b"], "11 queued tails cost more than the beginning"
    assert Counter(places) == {"a": 25, "b": 15}, "the other computes the beginning once, and takes its part"
    assert sum(route.num_uncomputed for route in routes) == 100 + 40 * 10


@broken_by(routing.room_draws_no_row, "60 \\+ 3 x 50")
def check_what_is_new_goes_where_there_is_room_and_what_is_known_stays() -> None:
    """Conversations with the same beginning come one after the other, so the queues are empty and the costs of
    computing alone decide.
    """
    router = Router(there("a"), there("b"))
    router.send(tokens(1))
    router.report(there("a", num_free=10), there("b", num_free=1000))
    assert router.send(tokens(1, 110)).replica == "a", "there is room"
    assert router.send(tokens(1, 140)).replica == "a", "less than a quarter is new"
    assert router.send([*tokens(1, 100), *tokens(2, 60)]).replica == "b", "60 + 3 x 50, or 160"
    assert router.send([*tokens(1, 100), *tokens(3, 60)]).replica == "b", "it has the beginning now"


def test_a_replica_with_room_gets_no_more_rows_at_once_than_a_full_one() -> None:
    """A restarted replica has free slots for every row that comes, but must not get them all at once."""
    router = Router(there("a"), there("b", num_free=1000))
    router.send(tokens(1), avoid="b")
    sent = [router.send(tokens(number), computes=False).replica for number in range(2, 8)]
    assert sent == ["b", "a"] * 3
    router.compute()
    router.report(there("a"), there("b", load=1, num_free=1000))
    assert router.send([*tokens(1), *tokens(8)]).replica == "a", "100, or 200 and 1"


@pytest.mark.parametrize("routes_by_prefix", [True, False])
def test_a_row_that_uses_no_cache_does_not_leave_a_full_replica(routes_by_prefix: bool) -> None:
    router = Router(there("a", load=10), there("b", load=40, num_free=1000), routes_by_prefix=routes_by_prefix)
    assert router.send(tokens(1), salt=None if routes_by_prefix else "").replica == "a"


def test_a_replica_without_a_cache_gets_a_row_only_if_it_computes_less_first() -> None:
    """A replica without a cache always has free slots, and what it computes is of no use to later rows. So its free
    slots do not count.
    """
    plain = there("b", max_cached=0, num_free=1000)
    router = Router(there("a"), plain)
    for number in range(1, 4):
        assert router.send(tokens(number)).replica == "a", "both cost the same"
    assert router.send([*tokens(1), *tokens(4, 300)]).replica == "a", "the other one's room draws nothing"
    router.report(there("a", load=10), plain)
    assert router.send(tokens(5)).replica == "b"


def test_replicas_fill_in_proportion_to_what_they_keep() -> None:
    router = Router(there("a", max_cached=900), there("b", max_cached=300))
    sent = Counter(router.send(tokens(number)).replica for number in range(1, 9))
    assert sent == {"a": 6, "b": 2}


def test_where_no_replica_has_room_evictions_count_nothing() -> None:
    router = Router(there("a"), there("b"))
    router.send(tokens(1))
    router.report(there("a"), there("b", num_free=150))
    assert router.send([*tokens(1, 100), *tokens(2, 60)]).replica == "a"


def test_with_routing_switched_off_the_load_decides() -> None:
    router = Router(there("a"), there("b"), routes_by_prefix=False)
    assert router.send(tokens(1), computes=False).replica == "a"
    assert router.send(tokens(2), computes=False).replica == "b"
    assert router.send(tokens(2), computes=False) == Route("a", 0, 100)
    assert router.num_known == {"a": 0, "b": 0}


# ---- in the engine --------------------------------------------------------------------------------------------------

BOTH = ReplicasChanged(
    tuple(Replica(address, True, instance_id=address, max_cached_tokens=1000) for address in ("first", "second"))
)
LONG = list(range(1, 41))


def test_rows_that_are_not_ready_are_their_replicas_load() -> None:
    engine = ScriptedEngine(max_rows=8, replicas=BOTH)
    engine.submit("long", LONG, 3, cache_salt="")
    engine.submit("short", range(101, 111), 3, cache_salt="")
    assert places(engine.step()) == {"long": "first", "short": "second"}
    engine.submit("next", range(201, 206), 3, cache_salt="")
    assert places(engine.step()) == {"next": "second"}, "5 tokens after 10, or after 40"
    engine.hand_over("long")
    engine.step()
    engine.landing.run_all()
    engine.submit("last", range(301, 306), 3, cache_salt="")
    engine.submit("its end", [*LONG, 7, 8], 3, cache_salt="")
    assert places(engine.step()) == {"last": "first", "its end": "first"}
    assert engine.engine.load().num_expected_cached == 40
    assert engine.engine.load().num_known_tokens == {"first": 47, "second": 15}
    engine.run()


@pytest.mark.parametrize("ending", ["refused", "lost", "cancelled"])
def test_evictions_are_believed_after_rows_that_were_never_computed(ending: str) -> None:
    replica = Replica("first", True, instance_id="first", max_cached_tokens=100)
    clock = iter(range(0, 10**9, 1000))  # a refused request may be retried at once
    engine = ScriptedEngine(replicas=ReplicasChanged((replica,)), clock=lambda: float(next(clock)))
    for number in range(20):
        engine.submit(str(number), tokens(number, 50), 3, cache_salt="")
        while str(number) not in engine.handoffs:
            engine.step()
        call_id = engine.handoffs[str(number)].call_id
        if ending == "refused":
            engine.refuse(str(number), RowFailure.CAPACITY, retryable=False)
        elif ending == "lost":
            engine.post(CallEnded(call_id, PrefillUnavailable("reset")))
            engine.abort(str(number))
        else:
            engine.abort(str(number))
        engine.step()
    for load in (1, 2):
        engine.post(ReplicasChanged((replace(replica, num_uncomputed_tokens=load),)))
        engine.step()
    assert engine.engine.load().num_known_tokens == {"first": 100}
    engine.post(ReplicasChanged((replace(replica, num_evicted_tokens=60),)))
    engine.step()
    assert engine.engine.load().num_known_tokens == {"first": 40}


def test_a_request_that_waits_for_a_row_is_not_looked_up_at_every_replica_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine(max_rows=1, replicas=BOTH)
    for number in range(5):
        engine.submit(str(number), [number, *LONG], 3, cache_salt="")
    engine.step()
    match, looked_up = PrefixTree.match, []

    def noting(self: PrefixTree, tokens: NDArray[np.int64], namespace: str) -> Prefix:
        looked_up.append(tokens)
        return match(self, tokens, namespace)

    monkeypatch.setattr(PrefixTree, "match", noting)
    for _ in range(10):
        engine.step()
    assert not looked_up
    engine.abort("0")
    assert places(engine.step()) == {"1": "second"}
    assert looked_up, "nothing was noted"
    engine.run()


# ---- mutants --------------------------------------------------------------------------------------------------------


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
