"""Tests that the tree finds exactly the KV that depends on the same tokens, evicts nothing that is held, and loses no
slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from common.kv.prefix_tree import HeldPrefix, PrefixTree

NUM_SLOTS = 40
NAMESPACES = ("", "a")
LOOKAHEADS = (0, 1, 3)


def array(numbers: Sequence[int]) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def held_after_insert(
    tree: PrefixTree, tokens: Sequence[int], first_slot: int, namespace: str = "", *, num_cached: int = 0
) -> HeldPrefix:
    """Inserts `tokens` with slots from `first_slot` on, and checks that `num_cached` positions were cached before.
    Returns the hold on them.
    """
    slots = first_slot + np.arange(len(tokens) - tree.lookahead)
    held = tree.hold(array([]), namespace, 0)
    assert tree.insert(held, array(tokens), slots) == num_cached
    return held


def insert(
    tree: PrefixTree, tokens: Sequence[int], first_slot: int, namespace: str = "", *, num_cached: int = 0
) -> None:
    tree.let_go(held_after_insert(tree, tokens, first_slot, namespace, num_cached=num_cached))
    tree.check()


def num_matched(tree: PrefixTree, tokens: Sequence[int], namespace: str = "") -> int:
    return tree.match(array(tokens), namespace).num_tokens


def cached_slots(tree: PrefixTree, tokens: Sequence[int]) -> list[int]:
    held = tree.hold(array(tokens), "", len(tokens))
    tree.use(held)
    slots: list[int] = held.slots().tolist()
    tree.let_go(held)
    return slots


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_position_is_shared_if_the_tokens_up_to_its_lookahead_agree(lookahead: int) -> None:
    tree = PrefixTree(lookahead)
    insert(tree, [1, 2, 3, 4, 5, 6, 7, 8], first_slot=10)
    num_positions = 8 - lookahead
    assert num_matched(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == num_positions
    assert num_matched(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]) == num_positions, "what follows is not known"
    assert num_matched(tree, [1, 2, 3, 4, 5, 9, 9, 9]) == 5 - lookahead, "5 tokens agree"
    assert num_matched(tree, [1, 2, 3, 4, 5]) == 5 - lookahead, "what follows is not given"
    assert num_matched(tree, [1, 2, 3, 9, 5, 6, 7, 8]) == 3 - lookahead
    assert num_matched(tree, [9, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert num_matched(tree, []) == 0


def test_what_is_after_a_hold_does_not_count_as_used() -> None:
    tree = PrefixTree(1)
    insert(tree, [1, 2, 3, 4, 5, 6], first_slot=10)
    insert(tree, [7, 7, 7], first_slot=20)
    held = tree.hold(array([1, 2, 3, 4, 5, 6]), "", 2)
    tree.use(held)
    tree.let_go(held)
    assert [sorted(tree.evict(num_slots).tolist()) for num_slots in (3, 2, 2)] == [[12, 13, 14], [20, 21], [10, 11]]


def test_a_hold_that_was_let_go_cannot_be_used() -> None:
    tree = PrefixTree(0)
    held = held_after_insert(tree, [1, 2], first_slot=10)
    tree.let_go(held)
    for use in (held.slots, lambda: tree.let_go(held), lambda: tree.insert(held, array([3]), array([12]))):
        with pytest.raises(AssertionError, match="was let go"):
            use()


def test_the_least_recently_used_goes_first() -> None:
    tree = PrefixTree(1)
    for number in range(1, 5):
        insert(tree, [number] * 3, first_slot=10 * number)
    cached_slots(tree, [1, 1, 1])
    cached_slots(tree, [3, 3, 3])
    assert [sorted(tree.evict(2).tolist()) for _ in range(4)] == [[20, 21], [40, 41], [10, 11], [30, 31]]


def test_a_long_hold_does_not_count_as_use() -> None:
    tree = PrefixTree(0)
    held = held_after_insert(tree, [1, 1], first_slot=10)
    insert(tree, [2, 2], first_slot=20)
    tree.let_go(held)
    assert sorted(tree.evict(2)) == [10, 11]


def test_a_leaf_is_evicted_from_its_end_and_its_rest_still_matches() -> None:
    tree = PrefixTree(3)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    insert(tree, tokens, first_slot=10)
    assert tree.evict(2).tolist() == [13, 14]
    tree.check()
    assert cached_slots(tree, tokens) == [10, 11, 12]
    assert num_matched(tree, [1, 2, 3, 4, 5, 9, 9, 9]) == 2, "the tokens after the rest are still known"
    insert(tree, tokens, first_slot=20, num_cached=3)
    assert cached_slots(tree, tokens) == [10, 11, 12, 23, 24]


def test_branches_are_evicted_before_what_they_hang_from() -> None:
    tree = PrefixTree(1)
    insert(tree, [1, 2, 3, 4, 5], first_slot=10)
    insert(tree, [1, 2, 3, 7, 7], first_slot=20, num_cached=2)
    insert(tree, [6, 6], first_slot=30)
    assert [sorted(tree.evict(2).tolist()) for _ in range(3)] == [[12, 13], [22, 23], [10, 11]]
    assert tree.evict(2).tolist() == [30]


def test_insert_goes_on_where_the_hold_ends() -> None:
    tree = PrefixTree(1)
    held = held_after_insert(tree, [1, 2, 3], first_slot=10)
    assert tree.insert(held, array([3, 4, 5]), array([12, 13])) == 0
    assert held.num_tokens == 4 and held.slots().tolist() == [10, 11, 12, 13]
    assert tree.insert(held, array([5]), array([])) == 0
    assert held.num_tokens == 4
    with pytest.raises(AssertionError, match="do not follow"):
        tree.insert(held, array([4, 5]), array([14]))
    with pytest.raises(AssertionError, match="3 tokens for 1 slots"):
        tree.insert(held, array([5, 6, 7]), array([14]))


def test_the_arrays_of_an_insert_may_be_reused() -> None:
    tree = PrefixTree(0)
    tokens, slots = array([1, 2, 3]), array([10, 11, 12])
    tree.insert(tree.hold(tokens, "", 3), tokens, slots)
    tokens[:] = slots[:] = 0
    assert cached_slots(tree, [1, 2, 3]) == [10, 11, 12]


def test_what_is_left_of_a_long_sequence_does_not_keep_its_memory() -> None:
    tree = PrefixTree(1)
    insert(tree, range(10_000), first_slot=0)
    assert num_matched(tree, range(10_000)) == 9_999
    tree.let_go(tree.hold(array(range(10_000)), "", 10))
    tree.evict(9_995)
    node = tree.match(array(range(10_000)), "").node
    for kept in (node.tokens, node.slots):
        assert (kept if kept.base is None else kept.base).nbytes <= 20 * 8


def test_the_queue_does_not_grow_with_use() -> None:
    tree = PrefixTree(0)
    for number in range(3):
        insert(tree, [number, number], first_slot=10 * number)
    for _ in range(50):
        for number in range(3):
            cached_slots(tree, [number])
            num_matched(tree, [number, number])
            cached_slots(tree, [number, number])
    assert len(tree._queue) <= 6
    tree.check()


def test_what_is_forgotten_does_not_match_and_is_evicted_first() -> None:
    tree = PrefixTree(1)
    insert(tree, [5, 5, 5], first_slot=50)
    insert(tree, [1, 2, 3, 3], first_slot=10)
    bad = held_after_insert(tree, [1, 2, 4, 4], first_slot=20, num_cached=1)
    insert(tree, [1, 3, 3], first_slot=30)
    tree.forget(bad)
    tree.check()
    assert sorted(tree.evict(2)) == [11, 12], "before [5, 5, 5], which was not used for longer"
    assert num_matched(tree, [1, 2, 4, 4]) == num_matched(tree, [1, 2, 3, 3]) == 0
    assert num_matched(tree, [1, 3, 3]) == num_matched(tree, [5, 5, 5]) == 2, "they begin with other tokens"
    assert bad.slots().tolist() == [10, 21, 22]
    tree.let_go(bad)
    tree.check()
    assert sorted(tree.evict(3)) == [10, 21, 22]
    assert tree.num_slots == 4


def test_the_check_finds_wrong_counts_and_leaves_that_are_not_queued() -> None:
    def tree_and_leaf() -> tuple[PrefixTree, HeldPrefix]:
        tree = PrefixTree(0)
        insert(tree, [1, 2], first_slot=10)
        return tree, tree.hold(array([1, 2]), "", 2)

    tree, held = tree_and_leaf()
    held.node.num_holders += 1
    with pytest.raises(AssertionError, match="holders are counted wrongly"):
        tree.check()
    tree, held = tree_and_leaf()
    held.node.slots = array([10, 11, 12])
    with pytest.raises(AssertionError):
        tree.check()
    tree, held = tree_and_leaf()
    tree._num_evictable += 1
    with pytest.raises(AssertionError, match="slots are counted wrongly"):
        tree.check()
    tree, held = tree_and_leaf()
    node = held.node
    tree.let_go(held)
    tree._queue.clear()
    node.is_queued = False
    with pytest.raises(AssertionError, match="not queued"):
        tree.check()


Sequenced = tuple[int, ...]
token_lists = st.integers(0, 12).flatmap(lambda length: st.lists(st.integers(0, 1), min_size=length, max_size=length))
namespaces = st.sampled_from(NAMESPACES)


@dataclass(eq=False)
class Holder:
    """The naive model's record of one hold (a prefix that somebody uses): its tokens, its namespace and the slots that
    it must keep.
    """

    held: HeldPrefix
    namespace: str
    tokens: Sequenced  # of its positions and the lookahead; for no positions, empty
    slots: list[int]
    is_forgotten: bool = False


class PrefixTreeMachine(RuleBasedStateMachine):
    """Compares the tree with a naive model: a dictionary that maps the tokens on which a position's KV depends to its
    slot.
    """

    @initialize(lookahead=st.sampled_from(LOOKAHEADS))
    def begin(self, lookahead: int) -> None:
        self.tree = PrefixTree(lookahead)
        self.lookahead = lookahead
        self.free = [*range(1, NUM_SLOTS + 1)]
        self.cached: dict[tuple[str, Sequenced], int] = {}
        self.forgotten: set[int] = set()
        self.holders: list[Holder] = []

    def slots_of(self, namespace: str, tokens: Sequence[int]) -> list[int]:
        """Returns the slots of the longest prefix of `tokens` that the naive model has cached."""
        slots = []
        for end in range(1 + self.lookahead, len(tokens) + 1):
            slot = self.cached.get((namespace, tuple(tokens[:end])))
            if slot is None:
                break
            slots.append(slot)
        return slots

    def draw_holder(self, data: st.DataObject) -> Holder:
        return data.draw(st.sampled_from(self.holders))

    @rule(tokens=token_lists, namespace=namespaces)
    def match(self, tokens: list[int], namespace: str) -> None:
        assert num_matched(self.tree, tokens, namespace) == len(self.slots_of(namespace, tokens))

    @rule(tokens=token_lists, namespace=namespaces, max_tokens=st.integers(0, 12))
    def hold(self, tokens: list[int], namespace: str, max_tokens: int) -> None:
        self.holders.append(self.new_holder(tokens, namespace, max_tokens))

    @rule(tokens=token_lists, namespace=namespaces)
    def hold_insert_and_let_go(self, tokens: list[int], namespace: str) -> None:
        holder = self.new_holder(tokens, namespace, len(tokens))
        self.insert_after(holder, tokens[len(holder.slots) :])
        self.tree.let_go(holder.held)

    def new_holder(self, tokens: list[int], namespace: str, max_tokens: int) -> Holder:
        slots = self.slots_of(namespace, tokens)[:max_tokens]
        held = self.tree.hold(array(tokens), namespace, max_tokens)
        known = tokens[: len(slots) + self.lookahead] if slots else []
        return Holder(held, namespace, tuple(known), slots)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), tokens=token_lists)
    def insert(self, data: st.DataObject, tokens: list[int]) -> None:
        holder = self.draw_holder(data)
        self.insert_after(holder, [*holder.tokens[len(holder.slots) :], *tokens])

    def insert_after(self, holder: Holder, tokens: list[int]) -> None:
        first = len(holder.slots)
        tokens = tokens[: len(self.free) + self.lookahead]
        num_new = len(tokens) - self.lookahead
        if num_new < 0:
            return
        slots, self.free = self.free[:num_new], self.free[num_new:]
        sequence = (*holder.tokens[:first], *tokens)
        num_kept = self.tree.insert(holder.held, array(tokens), array(slots))
        self.free += slots[:num_kept]
        if holder.is_forgotten:
            assert num_kept == num_new
            return
        assert num_kept == len(self.slots_of(holder.namespace, sequence)) - first
        for position in range(num_kept, num_new):
            end = first + position + 1 + self.lookahead
            self.cached[holder.namespace, sequence[:end]] = slots[position]
        holder.slots = self.slots_of(holder.namespace, sequence)
        holder.tokens = sequence if holder.slots else ()
        assert holder.held.num_tokens == first + num_new

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        holder = self.draw_holder(data)
        self.holders.remove(holder)
        self.tree.let_go(holder.held)

    @rule(num_slots=st.integers(0, 8))
    def evict(self, num_slots: int) -> None:
        num_evictable = self.tree.num_evictable
        evicted = self.tree.evict(num_slots).tolist()
        assert len(evicted) == min(num_slots, num_evictable)
        assert not self.held_slots() & set(evicted)
        self.free += evicted
        self.forgotten -= set(evicted)
        self.cached = {key: slot for key, slot in self.cached.items() if slot not in set(evicted)}
        for namespace, tokens in self.cached:
            is_first = len(tokens) == 1 + self.lookahead
            assert is_first or (namespace, tokens[:-1]) in self.cached, "a position went before one that follows it"

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        holder = self.draw_holder(data)
        self.tree.forget(holder.held)
        if holder.slots and not holder.is_forgotten:
            self.drop(holder.namespace, holder.tokens[: 1 + self.lookahead])

    def drop(self, namespace: str, first: Sequenced) -> None:
        """Makes the naive model forget all sequences that begin with `first`."""

        def begins(key: tuple[str, Sequenced]) -> bool:
            return key[0] == namespace and key[1][: len(first)] == first

        self.forgotten |= {slot for key, slot in self.cached.items() if begins(key)}
        self.cached = {key: slot for key, slot in self.cached.items() if not begins(key)}
        for holder in self.holders:
            holder.is_forgotten |= bool(holder.slots) and begins((holder.namespace, holder.tokens))

    def held_slots(self) -> set[int]:
        return {slot for holder in self.holders for slot in holder.slots}

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        in_tree = sorted([*self.cached.values(), *self.forgotten])
        assert sorted(self.tree.slots.tolist()) == in_tree
        assert sorted([*in_tree, *self.free]) == [*range(1, NUM_SLOTS + 1)]
        assert self.tree.num_slots == len(in_tree)
        assert self.tree.num_evictable == len(set(in_tree) - self.held_slots())

    @invariant()
    def every_hold_keeps_its_slots(self) -> None:
        for holder in self.holders:
            assert holder.held.slots().tolist() == holder.slots

    @invariant()
    def the_tree_agrees_with_itself(self) -> None:
        self.tree.check()

    def teardown(self) -> None:
        for holder in self.holders:
            self.tree.let_go(holder.held)
        self.tree.check()
        assert len(self.tree.evict(NUM_SLOTS)) + len(self.free) == NUM_SLOTS
        self.tree.check()


TestPrefixTreeMachine = PrefixTreeMachine.TestCase
TestPrefixTreeMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
