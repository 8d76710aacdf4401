"""A radix tree of the KV in the pool: it finds the slots that hold the KV of the prefix of a prompt.

    caller's slots ──insert──▶ in a node that is held ──let_go──▶ in a node that nobody holds ──evict──▶ caller's slots
                                       ▲                                    │
                                       └──────────────── hold ──────────────┘

Each node has the slots of a run of positions, and its children continue that run. The KV of position i depends on the
tokens 0 to i + lookahead, so a node of N positions stores N + lookahead tokens. The last `lookahead` of them are also
the first ones of every child. With a lookahead of 1:

    position    0 1 2 3 4
    tokens      a b c d e f     two sequences that differ in one token: they share the positions 0 and 1 only,
                a b c x y z     because the KV of position 2 depends on d or x

    node        tokens a b c    slots of 0 1
     ├─ child   tokens c d e f  slots of 2 3 4      its key is c d, the first 1 + lookahead tokens
     └─ child   tokens c x y z  slots of 2 3 4      its key is c x
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.kv.slot_allocator import Slots

__all__ = ["HeldPrefix", "Prefix", "PrefixTree", "num_same"]

Tokens = NDArray[np.int64]
Key = tuple[str, bytes]  # namespace, first 1 + lookahead tokens


@dataclass(eq=False, slots=True)
class Node:
    """A run of N positions. `tokens` [N + lookahead], `slots` [N]. A root has no positions, and is never held or
    evicted.
    """

    number: int
    parent: Node | None
    key: Key
    tokens: Tokens
    slots: Slots
    last_used: int = 0
    num_holders: int = 0  # holds that end in this node or below it
    children: dict[Key, Node] = field(default_factory=dict)
    is_queued: bool = False  # it has an entry in the tree's queue, at most one

    def path(self) -> Iterator[Node]:
        """Yields this node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Prefix(NamedTuple):
    """A cached prefix: how many tokens it has, the deepest node, and how many positions of that node belong to it.

    It says what was cached at the time of the call. Nothing keeps the slots from being evicted: see `PrefixTree.hold`.
    """

    num_tokens: int
    node: Node
    num_in_node: int

    def slots(self) -> Slots:
        """Returns the slots that the tree has for the prefix, [num_tokens] int64: slots[i] holds the KV of token i."""
        return _slots_to(self.node)[: self.num_tokens]


class HeldPrefix:
    """A cached prefix that the tree keeps until `PrefixTree.let_go`. The first `num_tokens` positions belong to it."""

    def __init__(self, node: Node, num_tokens: int, namespace: str) -> None:
        self.num_tokens = num_tokens
        self.namespace = namespace
        self._node: Node | None = node

    @property
    def node(self) -> Node:
        """The node that the prefix ends with."""
        assert self._node is not None, "the prefix was let go"
        return self._node

    def slots(self) -> Slots:
        """Returns the slots that the tree has for the prefix, [num_tokens] int64: slots[i] holds the KV of token i."""
        return _slots_to(self.node)


class PrefixTree:
    """Maps each cached token sequence of a namespace to the slots of its positions. Namespaces share nothing.

    `lookahead` is the number of tokens after a position on which its KV depends, besides those up to it: the number of
    layers of the draft head, 0 without a head. The tree owns its slots: it takes them over in `insert`, and returns
    them from `evict`. All tokens and slots are int64.
    """

    def __init__(self, lookahead: int) -> None:
        assert lookahead >= 0
        self.lookahead = lookahead
        self._num_slots = 0
        self._num_evictable = 0
        self._clock = 0  # counts uses of nodes; a forgotten node's last use is 0
        self._num_created = 0
        self._root = self._new_root()
        self._nodes: dict[int, Node] = {}  # by number: all but roots, including those that were forgotten
        self._holds: dict[HeldPrefix, None] = {}
        # Every leaf without holders is in this heap of (last used, number, node). An entry may be out of date: the
        # node is in use by now, or was used again since. `evict` finds out when it meets the entry.
        self._queue: list[tuple[int, int, Node]] = []

    @property
    def num_slots(self) -> int:
        """The number of slots that the tree owns."""
        return self._num_slots

    @property
    def num_evictable(self) -> int:
        """The number of slots that nobody holds: `evict` can return that many."""
        return self._num_evictable

    @property
    def slots(self) -> Slots:
        """The slots that the tree owns, [num_slots], in no particular order. Slow: it visits every node."""
        return _joined(node.slots for node in self._nodes.values())

    def match(self, tokens: Tokens, namespace: str) -> Prefix:
        """Returns the longest cached prefix of `tokens` [T], at most T - lookahead positions.

        The prefix is not held and does not count as used. Each `insert` or `evict` may change it, so call this before
        each decision.
        """
        return self._walk(self._root, tokens, namespace, len(tokens) - self.lookahead)

    def hold(self, tokens: Tokens, namespace: str, max_tokens: int) -> HeldPrefix:
        """Holds the longest cached prefix of `tokens` [T], at most `max_tokens` and T - lookahead positions.

        Its slots are not evicted until `let_go`, but only `use` counts as a use of it. A prefix of no tokens is held in
        the same way: `insert` begins there.
        """
        prefix = self._walk(self._root, tokens, namespace, min(max_tokens, len(tokens) - self.lookahead))
        node = self._end_node(prefix)
        held = HeldPrefix(node, prefix.num_tokens, namespace)
        self._holds[held] = None
        self._add_holder(node, above=None)
        return held

    def use(self, held: HeldPrefix) -> None:
        """Notes that a held prefix is used now. What has not been used for longest is evicted first."""
        self._mark_used(held.node)

    def num_held_only_by(self, holds: Iterable[HeldPrefix]) -> int:
        """Returns how many slots become evictable when all of `holds` are let go."""
        num_holders: dict[Node, int] = {}
        for held in holds:
            for node in held.node.path():
                num_holders[node] = num_holders.get(node, 0) + 1
        return sum(len(node.slots) for node, number in num_holders.items() if number == node.num_holders)

    def let_go(self, held: HeldPrefix) -> None:
        """Ends a hold. The slots stay cached until they are evicted."""
        node = held.node
        for each in node.path():
            each.num_holders -= 1
            if each.num_holders == 0:
                self._num_evictable += len(each.slots)
        self._enqueue(node)
        del self._holds[held]
        held._node = None

    def insert(self, held: HeldPrefix, tokens: Tokens, slots: Slots) -> int:
        """Caches the N positions after `held`, and moves the hold to the last of them, also if all were cached before.

        `tokens` [N + lookahead] begin with the token after the held prefix. `slots` [N] belong to the caller. Returns
        how many of them, from the first, the caller keeps, because the tree has these positions already; the tree takes
        over the others. For all N positions `held.slots()` then gives the tree's slots, not those that the caller kept.

        If the prefix was forgotten in the meantime, the caller keeps all slots and the hold does not move.
        """
        num_tokens = len(slots)
        node = held.node
        overlap = node.tokens[len(node.slots) :]
        assert len(tokens) == num_tokens + self.lookahead, f"{len(tokens)} tokens for {num_tokens} slots"
        assert np.array_equal(overlap, tokens[: len(overlap)]), "the tokens do not follow the held prefix"
        if not self._is_reachable(node):
            return num_tokens
        prefix = self._walk(node, tokens, held.namespace, num_tokens)
        num_kept = prefix.num_tokens
        end = self._end_node(prefix)
        if num_kept < num_tokens:
            tokens, slots = tokens[num_kept:].copy(), slots[num_kept:].copy()  # the caller may reuse its arrays
            end = self._new_node(end, self._key(held.namespace, tokens), tokens, slots)
            self._num_slots += len(slots)
            self._num_evictable += len(slots)
        self._mark_used(end)
        self._add_holder(end, above=node)
        held._node = end
        held.num_tokens += num_tokens
        return num_kept

    def evict(self, num_slots: int) -> Slots:
        """Gives up to `num_slots` slots back to the caller; fewer only if all others are held.

        The least recently used sequence goes first, from its end, as far as it is not held or shared with a sequence
        that is still cached. Takes O(log nodes) per node, and also per node that was used since it was queued.
        """
        evicted: list[Slots] = []
        num_missing = num_slots
        while num_missing > 0 and self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            node.is_queued = False
            if last_used == node.last_used and _is_free_leaf(node):
                num_left = max(len(node.slots) - num_missing, 0)
                evicted.append(node.slots[num_left:])
                num_missing -= len(node.slots) - num_left
                self._shorten(node, num_left)
            else:
                self._enqueue(node)
        slots = _joined(evicted)
        self._num_slots -= len(slots)
        self._num_evictable -= len(slots)
        return slots

    def forget(self, held: HeldPrefix) -> None:
        """Makes every cached sequence that begins with the first 1 + lookahead tokens of `held` unfindable.

        It is called when KV was found to be bad. Slots that are held stay valid until they are let go; the others are
        the first to be evicted. Does nothing for a prefix of no tokens. Takes time in proportion to the number of
        nodes.
        """
        *_, top = [held.node, *held.node.path()]
        if top.parent is not self._root:  # no tokens, or forgotten before
            return
        del self._root.children[top.key]
        top.parent = self._new_root()
        top.parent.children[top.key] = top
        below = [top]
        while below:
            node = below.pop()
            node.last_used = 0
            below += node.children.values()
        self._queue = [(node.last_used, number, node) for _, number, node in self._queue]
        heapq.heapify(self._queue)

    def check(self) -> None:
        """Checks the nodes, the counts and the queue against each other, else raises AssertionError. Slow."""
        num_holders = dict.fromkeys(self._nodes, 0)
        for held in self._holds:
            path = list(held.node.path())
            assert held.num_tokens == sum(len(node.slots) for node in path), "a hold does not end where its node does"
            for node in path:
                num_holders[node.number] += 1
        for number, node in self._nodes.items():
            parent = node.parent
            assert parent is not None and parent.children[node.key] is node, f"node {number} is not below its parent"
            assert 0 < len(node.slots) == len(node.tokens) - self.lookahead, f"node {number} has a wrong length"
            assert node.key == self._key(node.key[0], node.tokens), f"node {number} has another node's key"
            overlap = parent.tokens[len(parent.slots) :]
            assert np.array_equal(overlap, node.tokens[: len(overlap)]), f"node {number} does not follow its parent"
            assert node.num_holders == num_holders[number], f"node {number}: holders are counted wrongly"
            assert node.last_used <= parent.last_used or parent.parent is None, f"node {number} outlives its parent"
            assert node.is_queued or not _is_free_leaf(node), f"node {number} is not queued to be evicted"
        queued = [(number, last_used) for last_used, number, _ in self._queue]
        assert sorted(number for number, _ in queued) == [
            n for n, node in sorted(self._nodes.items()) if node.is_queued
        ]
        assert all(last_used <= self._nodes[number].last_used for number, last_used in queued), "queued too late"
        num_slots = sum(len(node.slots) for node in self._nodes.values())
        num_evictable = sum(len(node.slots) for node in self._nodes.values() if not node.num_holders)
        assert (self._num_slots, self._num_evictable) == (num_slots, num_evictable), "slots are counted wrongly"

    def _key(self, namespace: str, tokens: Tokens) -> Key:
        return namespace, tokens[: 1 + self.lookahead].tobytes()

    def _walk(self, node: Node, tokens: Tokens, namespace: str, max_tokens: int) -> Prefix:
        """Returns the longest prefix of `tokens`, at most `max_tokens` positions, that is cached from the end of `node`
        on.
        """
        assert tokens.dtype == np.int64, "the same tokens must have the same bytes"
        num_tokens, num_in_node = 0, len(node.slots)
        while num_tokens < max_tokens and num_in_node == len(node.slots):
            child = node.children.get(self._key(namespace, tokens[num_tokens:]))
            if child is None:
                break
            num_equal = num_same(child.tokens, tokens[num_tokens : max_tokens + self.lookahead])
            node, num_in_node = child, num_equal - self.lookahead
            num_tokens += num_in_node
        return Prefix(num_tokens, node, num_in_node)

    def _end_node(self, prefix: Prefix) -> Node:
        """Returns a node that ends where `prefix` does. Splits the deepest node if the prefix ends inside it.

        A split node keeps its second part, because every hold of it ends there or below.
        """
        _, node, num_upper = prefix
        if num_upper == len(node.slots):
            return node
        assert node.parent is not None
        upper = self._new_node(
            node.parent, node.key, _trimmed(node.tokens[: num_upper + self.lookahead]), _trimmed(node.slots[:num_upper])
        )
        upper.last_used, upper.num_holders = node.last_used, node.num_holders
        node.tokens, node.slots = _trimmed(node.tokens[num_upper:]), _trimmed(node.slots[num_upper:])
        node.parent, node.key = upper, self._key(node.key[0], node.tokens)
        upper.children[node.key] = node
        return upper

    def _new_node(self, parent: Node, key: Key, tokens: Tokens, slots: Slots) -> Node:
        self._num_created += 1
        node = Node(self._num_created, parent, key, tokens, slots)
        parent.children[key] = node
        self._nodes[node.number] = node
        return node

    def _new_root(self) -> Node:
        nothing = np.empty(0, dtype=np.int64)
        return Node(number=0, parent=None, key=("", b""), tokens=nothing, slots=nothing)

    def _is_reachable(self, node: Node) -> bool:
        """Returns False if the sequences of `node` were forgotten."""
        while node.parent is not None:
            node = node.parent
        return node is self._root

    def _mark_used(self, node: Node) -> None:
        self._clock += 1
        for each in node.path():
            each.last_used = self._clock

    def _add_holder(self, node: Node, *, above: Node | None) -> None:
        """Counts one more holder in `node` and the nodes above it, up to but not including `above` (None: all)."""
        for each in node.path():
            if each is above:
                break
            if each.num_holders == 0:
                self._num_evictable -= len(each.slots)
            each.num_holders += 1

    def _enqueue(self, node: Node) -> None:
        """Adds the node to the queue of nodes to evict, if it may be evicted."""
        if _is_free_leaf(node) and not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._queue, (node.last_used, node.number, node))

    def _shorten(self, node: Node, num_left: int) -> None:
        """Keeps the first `num_left` positions of a leaf. Removes the leaf if `num_left` is 0."""
        if num_left:
            node.tokens = _trimmed(node.tokens[: num_left + self.lookahead])
            node.slots = _trimmed(node.slots[:num_left])
            self._enqueue(node)
            return
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._nodes[node.number]
        self._enqueue(node.parent)


def _slots_to(node: Node) -> Slots:
    return _joined([each.slots for each in node.path()][::-1])


def _is_free_leaf(node: Node) -> bool:
    return not node.num_holders and not node.children and node.parent is not None


def num_same(left: Tokens, right: Tokens) -> int:
    """Returns how many tokens two arrays have in common before the first difference."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def _trimmed(part: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the view `part`, or a copy if the view would keep more than twice its own memory alive."""
    return part.copy() if part.base is not None and 2 * part.nbytes < part.base.nbytes else part


def _joined(parts: Iterable[Slots]) -> Slots:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
