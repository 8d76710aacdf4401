"""Tests that rows and slots are conserved in any order of operations, and that nothing in use is given out again."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.device.cpu import InlineStream
from common.device.stream import Stream
from common.kv.kv_shard import OneDevice
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import CacheKey, KvPool, LeaseState, RowLease
from common.kv.prefix_tree import PrefixTree

MAX_ROWS = 4
MAX_TOKENS = 24
STREAMS: tuple[Stream, ...] = tuple(InlineStream(name, wait_timeout_s=0.0) for name in ("forward", "landing"))


class ManualEvent:
    """An event that a test completes by hand."""

    error: BaseException | None = None

    def __init__(self) -> None:
        self._is_done = False

    def complete(self) -> None:
        self._is_done = True

    def is_done(self) -> bool:
        return self._is_done

    def synchronize(self, timeout_s: float) -> None:
        assert self._is_done, "the test waits on an event it has not completed"


def make_pool(
    *, max_rows: int = MAX_ROWS, max_kv_tokens: int = MAX_TOKENS, prefixes: PrefixTree | None = None
) -> KvPool:
    group = LayerGroupSpec(name="target", num_layers=2, num_planes=2, num_heads=1, head_dim=2, dtype="float32")
    return KvPool(
        groups=[group],
        max_rows=max_rows,
        max_kv_tokens=max_kv_tokens,
        max_tokens_per_row=max_kv_tokens,
        tensors=OneDevice(torch.device("cpu")),
        prefixes=prefixes,
    )


def grow(pool: KvPool, lease: RowLease, num_more: int = 1) -> bool:
    return pool.grow(np.array([lease.row]), np.array([lease.num_tokens + num_more]))


class PoolMachine(RuleBasedStateMachine):
    """A hypothesis state machine that calls the pool's operations (reserve, grow, use, release, complete, reclaim) in
    any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.held: list[RowLease] = []
        self.released: list[RowLease] = []
        self.events: dict[Stream, list[ManualEvent]] = {stream: [] for stream in STREAMS}
        self.used_until: dict[int, list[ManualEvent]] = {}

    @rule(num_tokens=st.integers(0, MAX_TOKENS))
    def reserve(self, num_tokens: int) -> None:
        fits = num_tokens <= self.pool.num_free_slots and self.pool.num_free_rows > 0
        lease = self.pool.reserve(num_tokens)
        assert (lease is not None) == fits
        if lease is None:
            return
        still_used = [event for event in self.used_until.pop(lease.row, []) if not event.is_done()]
        assert not still_used, f"row {lease.row} was given out while a forward may use it"
        in_use = {
            slot for other in (*self.held, *self.released) if not self.is_free(other) for slot in other.slots.tolist()
        }
        assert not in_use & set(lease.slots.tolist())
        assert lease.row != 0 and 0 not in lease.slots, "the padding row or slot was given out"
        self.held.append(lease)

    @staticmethod
    def is_free(lease: RowLease) -> bool:
        return lease.state is LeaseState.FREE

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.held))
        before = lease.slots.tolist()
        num_more = data.draw(st.integers(0, 3))
        had_room = self.pool.num_free_slots >= num_more
        assert grow(self.pool, lease, num_more) == had_room
        assert lease.slots[: len(before)].tolist() == before, "a live row's table only grows"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        event, stream = ManualEvent(), data.draw(st.sampled_from(STREAMS))
        self.events[stream].append(event)
        for lease in data.draw(st.lists(st.sampled_from(self.held), unique=True, min_size=1)):
            lease.use_until(event, stream)
            self.used_until.setdefault(lease.row, []).append(event)

    @precondition(lambda self: any(self.events.values()))
    @rule(data=st.data())
    def complete_oldest(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([events for events in self.events.values() if events])).pop(0).complete()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.held))
        self.held.remove(lease)
        self.released.append(lease)
        self.pool.release(lease)
        self.pool.release(lease)

    @rule()
    def reclaim(self) -> None:
        self.pool.reclaim()

    @invariant()
    def conserved(self) -> None:
        self.pool.check_conservation()
        for counts in (self.pool.row_counts(), self.pool.slot_counts()):
            parts = (
                counts.free
                + counts.reserved
                + counts.transferring
                + counts.running
                + counts.quarantined
                + counts.cached
            )
            assert parts == counts.total

    def teardown(self) -> None:
        for lease in self.held:
            self.pool.release(lease)
        for event in itertools.chain.from_iterable(self.events.values()):
            event.complete()
        self.pool.reclaim()
        assert self.pool.row_counts().free == MAX_ROWS
        assert self.pool.slot_counts().free == MAX_TOKENS


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_released_row_is_quarantined_until_its_last_event() -> None:
    pool = make_pool(max_rows=1)
    first = pool.reserve(3)
    assert first is not None
    landing, forward = ManualEvent(), ManualEvent()
    first.use_until(landing, STREAMS[0])
    first.use_until(forward, STREAMS[1])
    pool.release(first)
    assert pool.reclaim() == 0
    assert pool.reserve(1) is None
    landing.complete()
    assert pool.reclaim() == 0
    forward.complete()
    assert pool.reclaim() == 1
    assert pool.reserve(1) is not None


DAMAGES: dict[str, tuple[Callable[[KvPool, RowLease, RowLease], object], str]] = {
    "a slot is lost": (
        lambda pool, lease, _: pool._columns.num_slots.__setitem__(lease.row, lease.num_tokens - 1),
        "slots are lost",
    ),
    "a slot is held twice": (lambda pool, lease, other: lease.slots.__setitem__(0, other.slots[0]), "held twice"),
    **{
        f"slot {slot} is held": (lambda pool, lease, _, slot=slot: lease.slots.__setitem__(0, slot), "do not exist")
        for slot in (-1, 0, MAX_TOKENS + 1, 1 << 60)
    },
    "a row is counted in another state": (
        lambda pool, lease, _: pool._columns._states.__setitem__(lease.row, pool._columns._states[0]),
        "rows are counted wrongly",
    ),
    "a table lost an entry": (
        lambda pool, lease, _: pool.rows.req_to_token[lease.row, 1].zero_(),
        "table disagrees",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(damage: str) -> None:
    pool = make_pool()
    lease, other = pool.reserve(3), pool.reserve(2)
    assert lease is not None and other is not None
    damages, named = DAMAGES[damage]
    damages(pool, lease, other)
    with pytest.raises(AssertionError, match=named):
        pool.check_conservation()


@pytest.mark.parametrize("position", [-1, MAX_TOKENS])
def test_nothing_is_written_beside_its_row(position: int) -> None:
    table = make_pool().rows
    with pytest.raises(AssertionError, match="beside its row"):
        table.write_each(np.array([2, 2]), np.array([0, position]), np.array([5, 6]))
    assert not table.req_to_token.any()


@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_row_gives_back_slots_whose_kv_another_row_left_in_the_cache_unless_work_uses_it(is_in_use: bool) -> None:
    """Two rows with the same first tokens were reserved before either of them put its KV into the cache."""
    pool = make_pool(prefixes=PrefixTree(lookahead=0))
    first, second = (np.array([1, 2, 3, 4, last], np.int64) for last in (5, 6))
    lease, later = (pool.reserve(5, key=CacheKey(tokens, "")) for tokens in (first, second))
    assert lease is not None and later is not None
    event = ManualEvent()
    later.use_until(event, STREAMS[0])
    if not is_in_use:
        event.complete()
    own = later.slots.tolist()
    pool.keep(lease, first, 5)
    pool.keep(later, second, 5)
    pool.check_conservation()
    assert later.slots.tolist() == (own if is_in_use else [*lease.slots[:4].tolist(), own[4]])
    assert pool.num_free_slots == MAX_TOKENS - 10 + (0 if is_in_use else 4)
    pool.release(later)
    pool.release(lease)
    event.complete()
    pool.reclaim()
    pool.check_conservation()
    assert pool.num_free_slots == MAX_TOKENS


def test_kv_that_a_row_used_stays_longer_and_kv_that_was_only_looked_up_does_not() -> None:
    pool = make_pool(prefixes=PrefixTree(lookahead=0))
    first, second = (CacheKey(np.full(10, token, np.int64), "") for token in (1, 2))

    def use(key: CacheKey) -> None:
        lease = pool.reserve(10, key=key)
        assert lease is not None
        pool.keep(lease, key.token_ids, 10)
        pool.release(lease)
        pool.reclaim()

    def evict(num_tokens: int) -> None:
        lease = pool.reserve(MAX_TOKENS - 20 + num_tokens)
        assert lease is not None
        pool.release(lease)
        pool.reclaim()

    use(first)
    use(second)
    assert pool.num_cached(first) == 9
    assert pool.reserve(10, key=first, num_spared=MAX_TOKENS) is None
    evict(3)
    assert (pool.num_cached(first), pool.num_cached(second)) == (7, 9)
    use(first)
    evict(3)
    assert (pool.num_cached(first), pool.num_cached(second)) == (9, 7)
