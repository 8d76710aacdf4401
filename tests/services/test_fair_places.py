"""Tests of places (call slots) that clients share: a single client may use all of them, but cannot keep the others
out.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.addresses import network_of
from common.rpc.fair_shares import FairPlaces, Full, HeldPlace

NUM = 16  # and one eighth more


class Hall:
    """The places of a server, with a clock that the test moves. A client's tenant is named as CLIENT/TENANT."""

    def __init__(self, num_places: int = NUM) -> None:
        self.now_s = 100.0
        self.places = FairPlaces(num_places, clock=lambda: self.now_s)
        self.taken: dict[str, list[HeldPlace]] = {}

    def take(self, caller: str) -> bool:
        client, _, tenant = caller.partition("/")
        try:
            self.taken.setdefault(caller, []).append(self.places.take((client, tenant)))
        except Full as full:
            self.retry_after_s = full.retry_after_s
            return False
        return True

    def leave(self, caller: str) -> None:
        self.places.give_back(self.taken[caller].pop())

    def fill(self, caller: str) -> int:
        """Takes places for the caller until it gets no more, and returns how many it got."""
        num = 0
        while self.take(caller):
            num += 1
        return num


@pytest.fixture
def hall() -> Hall:
    return Hall()


def test_a_client_that_is_alone_has_all_places_again_and_again(hall: Hall) -> None:
    assert hall.fill("a") == NUM
    for _ in range(3 * NUM):
        hall.leave("a")
        assert hall.take("a")
    assert not hall.take("a")


def test_another_finds_places_at_once_and_those_that_become_free(hall: Hall) -> None:
    hall.fill("a")
    assert hall.fill("b") == NUM // 8
    for _ in range(NUM):
        hall.leave("a")
        assert not hall.take("a"), "kept for b, which was refused"
        hall.fill("b")
        if len(hall.taken["b"]) == NUM // 2:
            break
    assert len(hall.taken["b"]) == NUM // 2
    hall.leave("b")
    assert hall.take("b")


def test_what_was_wanted_once_is_not_kept_for_long(hall: Hall) -> None:
    hall.fill("a")
    hall.fill("b")
    for _ in range(NUM // 8):
        hall.leave("b")
    hall.leave("a")
    assert not hall.take("a")
    hall.now_s += 60.0
    assert hall.take("a")


def test_places_above_all_are_for_those_below_their_share_alone(hall: Hall) -> None:
    hall.fill("a")
    assert hall.take("b") and hall.take("b")
    assert not any(hall.take(client) for client in ("a", "b", "c"))


def test_one_place_is_one(hall: Hall) -> None:
    single = Hall(1)
    assert (single.take("a"), single.take("a"), single.take("b"), single.take("c")) == (True, False, True, False)


def test_when_to_come_again_follows_from_how_long_places_are_held_and_how_many_wait(hall: Hall) -> None:
    hall.fill("a")
    assert hall.retry_after_s == 1, "nothing is known yet"
    hall.now_s += 32.0
    hall.leave("a")
    hall.take("a")
    hall.now_s += 30.0  # long enough for requests of others to be forgotten
    told = [hall.retry_after_s for _ in range(8) if not hall.take("a")]
    assert told == [2, 4, 6, 8, 10, 12, 14, 16]
    for _ in range(100):
        hall.take("a")
    assert hall.retry_after_s == 34, "as many as it can have are waited for, and one"


@pytest.mark.parametrize("late_s", [0.0, 0.5, 1.0])
def test_one_request_that_comes_again_when_it_was_told_to_waits_no_longer_each_time(hall: Hall, late_s: float) -> None:
    hall.now_s += 1.0
    hall.fill("a")
    hall.now_s += 32.0
    hall.leave("a")
    hall.take("a")
    told = []
    for _ in range(20):
        hall.now_s += late_s + hall.retry_after_s
        assert not hall.take("a")
        told.append(hall.retry_after_s)
    assert set(told) == {2}


def test_the_request_that_was_to_come_first_has_come(hall: Hall) -> None:
    hall.fill("c")
    hall.now_s += 320.0
    hall.leave("c")
    assert hall.take("d")
    hall.fill("a")
    assert hall.retry_after_s == 20
    for _ in range(10):  # places are held for less time
        hall.leave("d")
        assert hall.take("d")
    assert (hall.take("a"), hall.retry_after_s) == (False, 14)
    hall.now_s += 14.0
    assert (hall.take("a"), hall.retry_after_s) == (False, 14), "two want places, not three"


def test_what_is_kept_for_who_was_refused_is_an_eighth_at_most(hall: Hall) -> None:
    hall.fill("a")
    hall.fill("b")
    for _ in range(100):
        hall.take("b")
    for _ in range(10):
        hall.leave("a")
    assert hall.fill("a") == 8 - NUM // 8, "8 are free, and b may come back for 6"


def test_a_refused_client_that_stays_away_is_waited_for_no_longer_than_it_was_told(hall: Hall) -> None:
    hall.fill("a")
    hall.fill("b")
    for _ in range(NUM // 8 + 1):
        hall.leave("a")
    assert not hall.take("a")
    hall.now_s += 2.5
    assert hall.take("a")


def test_a_tenant_gets_its_part_as_places_become_free(hall: Hall) -> None:
    assert hall.fill("a/1") == NUM
    assert not hall.take("a/2"), "the places above all are for other clients"
    assert hall.fill("b") == NUM // 8
    for _ in range(NUM):
        hall.leave("a/1")
        for each in ("a/1", "b", "a/2"):
            hall.fill(each)
    assert [len(hall.taken[each]) for each in ("b", "a/2", "a/1")] == [8, 4, 4]


def test_a_client_gets_no_more_places_for_having_many_tenants(hall: Hall) -> None:
    tenants = [f"a/{number}" for number in range(12)]
    assert sum(map(hall.fill, tenants)) == NUM
    assert hall.fill("b") == NUM // 8
    for _ in range(NUM // 2):
        hall.leave(max(tenants, key=lambda each: len(hall.taken[each])))
        for each in (*tenants, "b"):
            hall.fill(each)
    assert [sum(len(hall.taken[each]) for each in tenants), len(hall.taken["b"])] == [NUM // 2, NUM // 2]


def test_a_client_above_its_share_passes_its_places_on_among_its_tenants(hall: Hall) -> None:
    """Another client holds little and wants nothing, so what the first one lets go is its own."""
    assert hall.take("b") and hall.fill("a/1") == NUM - 1
    waiting = [f"a/{number}" for number in range(2, 26)]
    for each in waiting:
        hall.take(each)
    for _ in range(10):
        hall.leave("a/1")
        assert not hall.take("a/1"), "kept for tenants that hold nothing"
        assert sum(hall.take(each) for each in waiting if not hall.taken[each]) == 1


def test_a_tenant_is_not_passed_over_because_other_clients_want_places() -> None:
    hall = Hall(64)
    hall.fill("a/1")
    hall.fill("b")
    for _ in range(20):
        hall.take("b")
    assert not hall.take("a/2")
    for _ in range(8 + 9):
        hall.leave("a/1")
        assert not hall.take("a/1"), "8 are kept for b, and one for the other tenant"
    assert hall.take("a/2")


def test_what_is_kept_for_other_tenants_is_a_sixteenth_at_most() -> None:
    hall = Hall(64)
    hall.fill("a/1")
    for number in range(2, 12):
        assert not hall.take(f"a/{number}")
    for _ in range(4):
        hall.leave("a/1")
        assert not hall.take("a/1")
    hall.leave("a/1")
    assert hall.take("a/1"), "5 are free, and 10 tenants want one each"


def test_a_client_below_its_share_divides_it_as_it_likes_while_no_tenant_of_it_waits() -> None:
    hall = Hall(64)
    hall.fill("c")
    assert hall.take("a/2")
    hall.fill("b")
    for _ in range(10):
        hall.take("b")
    for _ in range(1 + 4):
        hall.leave("c")
    for _ in range(64 // 3 // 2 + 1):
        hall.leave("c")
        assert hall.take("a/1"), "b waits, but the client of both tenants holds less than its share too"


def test_the_tenants_of_one_client_delay_nobody_by_what_they_want(hall: Hall) -> None:
    """Not by the time after which others are to come again, nor by places kept for more than the client's share."""
    hall.fill("a/0")
    hall.now_s += 16.0
    hall.leave("a/0")
    hall.take("a/0")
    hall.fill("b")
    hall.now_s += 3.0
    assert not hall.take("b") and hall.retry_after_s == 1
    for number in range(1, 301):
        assert not hall.take(f"a/{number}")
    assert not hall.take("b") and hall.retry_after_s == 1 + NUM // 2 + 1
    for _ in range(NUM // 8 + 1):
        hall.leave("a/0")
    assert not hall.take("a/300"), "the place is still kept for b, which came before"
    assert hall.take("b")


@given(st.lists(st.tuples(st.sampled_from(("a", "b", "c/1", "c/2", "c/3")), st.booleans()), max_size=200))
def test_whatever_clients_do_places_add_up(moves: list[tuple[str, bool]]) -> None:
    hall = Hall(8)
    for client, takes in moves:
        if takes:
            hall.take(client)
        elif hall.taken.get(client):
            hall.leave(client)
        assert len(hall.places) == sum(map(len, hall.taken.values())) <= 9
    for client, taken in hall.taken.items():
        while taken:
            hall.leave(client)
    hall.now_s += 1000.0
    assert hall.fill("a") == 8


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("unix", "unix"),
    ],
)
def test_whose_an_address_is(host: str, network: str) -> None:
    assert network_of(host) == network
