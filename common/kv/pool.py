"""The KV pool: it stores KV, hands out rows and token slots, and takes them back when no stream work uses them.

     FREE ──reserve──▶ held by a RowLease ──release──▶ QUARANTINED ──reclaim──▶ FREE
                        RESERVED, TRANSFERRING,          until no stream work that
                        RUNNING (set by the engine)      touches the row is left

With a prefix cache, `keep` gives slots of a row to a PrefixTree. From then on the tree owns them, and the row holds
them like every other row whose tokens begin in the same way. Slots of the tree that no row holds count as free: they
are evicted when the free ones are used up.

A layer group with a window has slots of its own, for the last tokens of each row (see window_slots.py).

Only an engine's own thread calls this, except for `move_kv` and `populate`. Only `populate` blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.stream import Event, Stream
from common.device.upload import across_devices
from common.errors import StartupError
from common.host.memory import require_room
from common.host.untouched_memory import populate
from common.kv.kv_shard import WHOLE, KvShard, NoRoomForShard, PoolTensors
from common.kv.layer_group import DRAFT_GROUP, KV_FP8, TARGET_GROUP, LayerGroupSpec, WindowLayers, num_kept_before
from common.kv.prefix_tree import HeldPrefix, PrefixTree, num_same
from common.kv.rows import LeaseState, ReqToTokenPool, RowColumns
from common.kv.shared_pool import SharedPool
from common.kv.slot_allocator import PADDING_SLOT, SlotAllocator, Slots
from common.kv.window_slots import WindowKv, WindowSlots
from common.telemetry.stats import PoolCounts, PrefixCounts

__all__ = ["CacheKey", "CopyKv", "KvPool", "LeaseState", "RowLease"]

CopyKv = Callable[[Tensor, Tensor], object]
"""Copies KV [layers, planes, tokens, ...] from its second argument to its first, of the same shape and dtype."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Says which cached KV a row may use: KV in its `namespace`, of tokens that are equal to the row's first tokens.

    `token_ids` [N] int64 are the row's tokens. Rows of different namespaces never share KV.
    """

    token_ids: NDArray[np.int64]
    namespace: str


_NO_SLOTS: Slots = np.empty(0, np.int64)


class RowLease:
    """A row of the pool and its slots, lent to one request from `KvPool.reserve` until the row is reclaimed.

    `num_tokens` slots are reserved. The engine counts how many of them hold committed KV, as the request's `seq_len`.
    The first `num_cached` of them had their KV already when the row was reserved. `num_held` maps the name of each
    layer group with a window to `num_cached` if the row found that KV there too, and else to 0. `prefix` is the part of
    the prefix cache that the row holds; None if it uses no cache. `duplicates` are positions of `prefix` for which the
    row has slots of its own.
    """

    def __init__(
        self,
        row: int,
        slots: Slots,
        columns: RowColumns,
        *,
        prefix: HeldPrefix | None = None,
    ) -> None:
        """Makes the lease of `row`, and writes its `slots` and its state into `columns`, which all leases share.

        The first slots are those of `prefix`.
        """
        self.row = row
        self.prefix = prefix
        self.num_cached = 0 if prefix is None else prefix.num_tokens
        self.num_held: dict[str, int] = {}
        self.duplicates: list[slice] = []
        self.is_damaged = False
        self._shared = [slice(0, self.num_cached)]  # positions whose slots belong to the prefix tree
        self._columns = columns
        columns.slots[row, : len(slots)] = slots
        columns.num_slots[row] = len(slots)
        columns.num_shared[row] = self.num_cached
        self.state = LeaseState.RESERVED

    @property
    def slots(self) -> Slots:
        """The row's slots, [num_tokens] int64: slots[t] holds token t's KV.

        The array only grows, and stays valid until the row is reclaimed, but for slots that `KvPool.keep` replaces.
        """
        return self._columns.slots[self.row, : self.num_tokens]

    @property
    def num_tokens(self) -> int:
        return 0 if self.state is LeaseState.FREE else int(self._columns.num_slots[self.row])

    @property
    def own_slots(self) -> Slots:
        """The slots that become free with the row: those that do not belong to the prefix tree."""
        is_own = np.ones(self.num_tokens, np.bool_)
        for positions in self._shared:
            is_own[positions] = False
        return self.slots[is_own]

    @property
    def num_kept(self) -> int:
        """How many of the row's first tokens have their KV in the prefix cache: found there, or given to it."""
        return 0 if self.prefix is None else self.prefix.num_tokens

    def share(self, positions: slice) -> None:
        """Notes that the slots at `positions` belong to the prefix tree now."""
        self._shared.append(positions)
        self._columns.num_shared[self.row] += positions.stop - positions.start

    @property
    def state(self) -> LeaseState:
        return self._state

    @state.setter
    def state(self, state: LeaseState) -> None:
        self._state = state
        self._columns.set_state(self.row, state)

    @property
    def is_held(self) -> bool:
        """True until the lease is released."""
        return self.state not in (LeaseState.QUARANTINED, LeaseState.FREE)

    def use_until(self, event: Event, stream: Stream) -> None:
        """Notes that work on `stream` uses this row until `event`. The row is reclaimed only after that."""
        self._columns.use_until(self.row, event, stream)

    @property
    def is_in_use(self) -> bool:
        """True while stream work may still use the row, so that it must not be reclaimed."""
        return self._columns.is_in_use(self.row)


class KvPool:
    """The rows, the token slots and the KV of every layer group, allocated once at start-up.

    `shards[group]` is the KV of a group, and `buffers[group]` its first shard, [layers, planes, slots + 1, heads,
    head_dim], which the forwards of this process use; slot 0 is padding. With `memory` the buffers lie in that shared
    memory, which must have the same groups and numbers of slots; then `grow` must not be called. Without `memory`, the
    operating system provides a CPU's memory when it is first used or populated. `prefixes` is an empty tree for the
    prefix cache, or None to cache nothing. Raises StartupError if there is not enough memory.

    `tensors` makes the tensors that forwards use.

    `windows` are the target's layers that attend a window. Each of their groups has `max_window_tokens` slots, and a
    row writes at most `num_in_flight` tokens past those that are known to be computed.

    `num_changes` grows when a row is released or reclaimed, and when the prefix cache gets KV. After that `reserve` may
    succeed where it could not before, or find more cached KV.
    """

    def __init__(
        self,
        *,
        groups: Sequence[LayerGroupSpec],
        max_rows: int,
        max_kv_tokens: int,
        max_tokens_per_row: int,
        tensors: PoolTensors,
        windows: Sequence[WindowLayers] = (),
        max_window_tokens: int = 0,
        num_in_flight: int = 0,
        memory: SharedPool | None = None,
        prefixes: PrefixTree | None = None,
    ) -> None:
        assert max_tokens_per_row <= max_kv_tokens, "the longest row fits the pool"
        target, *others = groups
        groups = [target, *(layers.group for layers in windows), *others]
        self.groups = {group.name: group for group in groups}
        self._memory = memory
        num_slots = {group.name: max_window_tokens if group.window else max_kv_tokens for group in groups}
        self.shards = (
            _new_shards(groups, num_slots, tensors)
            if memory is None
            else {group.name: (KvShard(WHOLE, _view(memory, group)),) for group in groups}
        )
        self.buffers = {name: shards[0].kv for name, shards in self.shards.items()}
        self.rows = ReqToTokenPool(max_rows=max_rows, max_tokens_per_row=max_tokens_per_row, new_zeros=tensors.zeros)
        self._slots = SlotAllocator(max_kv_tokens)
        self._prefixes = PrefixTree(lookahead=0) if prefixes is None else prefixes  # without a cache it stays empty
        self._caches = prefixes is not None
        self._columns = RowColumns(max_rows + 1, max_tokens_per_row=max_tokens_per_row)
        self.windows = {
            group.name: WindowSlots(
                window=group.window,
                num_kept_before=num_kept_before(self.groups.values()),
                num_slots=max_window_tokens,
                num_in_flight=num_in_flight,
                num_pool_slots=max_kv_tokens,
                columns=self._columns,
                new_zeros=tensors.zeros,
            )
            for group in groups
            if group.window
        }
        self._target_windows = tuple(
            WindowKv(
                self.buffers[layers.group.name],
                self.windows[layers.group.name].table,
                self.windows[layers.group.name].slot_of,
                layers.layers,
            )
            for layers in windows
        )
        self.prefix_counts = PrefixCounts()
        self.num_changes = 0
        self._held: dict[int, RowLease] = {}
        self._quarantined: dict[int, RowLease] = {}

    def populate(self, check: Callable[[], None]) -> None:
        """Makes the operating system provide the buffers' memory now, so that no request waits for it.

        Does nothing on a GPU or in shared memory. Call it on another thread than the engine's. `check` is called
        between parts and may raise, to stop it. Raises OSError if the system cannot populate memory or lacks it.
        """
        if self._memory is None:
            for shard in chain.from_iterable(self.shards.values()):
                if shard.kv.device.type == "cpu" and shard.kv.numel():
                    populate(shard.kv, check)

    @property
    def num_free_slots(self) -> int:
        """The number of slots that a row can get now, including those of the prefix cache that no row holds."""
        return self._slots.num_free + self._prefixes.num_evictable

    @property
    def keeps_output(self) -> bool:
        """Whether the prefix cache may keep the KV of output tokens. It may not with a draft head of several layers.

        Such a head writes its KV of output tokens from drafts, some of which are rejected. With that KV it would guess
        other tokens than with the KV of a new prefill.
        """
        return self._prefixes.lookahead <= 1

    @property
    def num_free_rows(self) -> int:
        return self.rows.num_free

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def has_quarantined(self) -> bool:
        return bool(self._quarantined)

    def reserve(
        self,
        num_tokens: int,
        *,
        key: CacheKey | None = None,
        uses_cached: bool = True,
        num_spared: int = 0,
        is_received: bool = False,
    ) -> RowLease | None:
        """Returns a row with slots for its first `num_tokens` tokens, or None if there are too few rows or slots.

        With `key` the row's first slots are those of its longest cached prefix, which leaves at least one token to
        compute. Without `uses_cached` it has no such slots, but it may `keep` its KV. `num_spared` slots must stay
        free. `is_received` means that all KV that is not cached comes from another service. Then a cached prefix can be
        used even if groups with a window have lost its KV.
        """
        if self.rows.num_free == 0:
            return None
        if not all(window.may_promise(num_tokens, num_spared) for window in self.windows.values()):
            return None
        received = num_tokens if is_received else None
        prefix = self._hold(key, num_tokens - 1 if uses_cached else 0, received=received)
        held = _NO_SLOTS if prefix is None else prefix.slots()
        slots = self._take(num_tokens - len(held), num_spared)
        if slots is None:
            self._let_go(prefix)
            return None
        row = self.rows.take()
        assert row is not None
        if prefix is not None:
            self._prefixes.use(prefix)
        if self._memory is not None:
            self._memory.stamp(TARGET_GROUP, slots)
        slots = np.concatenate([held, slots])
        self.rows.write(row, 0, slots)
        lease = RowLease(row, slots, self._columns, prefix=prefix)
        self._held[row] = lease
        for name, window in self.windows.items():
            window.promise(np.array([row]), np.array([num_tokens]))
            lease.num_held[name] = window.hold(row, lease.num_cached, received=received)
        if is_received:
            self.extend_windows(np.array([row]), np.array([num_tokens]))
        counts = self.prefix_counts
        self.prefix_counts = replace(
            counts, num_tokens=counts.num_tokens + num_tokens, num_found=counts.num_found + lease.num_cached
        )
        return lease

    def num_cached(self, key: CacheKey | None, *, is_received: bool = False) -> int:
        """Returns how many tokens a row with `key` would find in the prefix cache now: at most all but one.

        `is_received` is that of `reserve`.
        """
        if key is None:
            return 0
        prefix = self._prefixes.match(key.token_ids, key.namespace)
        num_tokens = min(prefix.num_tokens, len(key.token_ids) - 1)
        if not self.windows:
            return num_tokens
        return self._num_usable(prefix.slots()[:num_tokens], len(key.token_ids) if is_received else None)

    def num_common(self, key: CacheKey, other: CacheKey | None, *, at_least: int = 1) -> int:
        """Returns how many tokens of `key` would have their KV in the prefix cache if all KV of `other` were there.

        Returns 0 if they are fewer than `at_least`, which is mostly found out without comparing all tokens.
        """
        last = at_least - 1 + self._prefixes.lookahead
        if other is None or not self._caches or key.namespace != other.namespace:
            return 0
        if last >= min(len(key.token_ids), len(other.token_ids)) or key.token_ids[last] != other.token_ids[last]:
            return 0
        num_equal = num_same(key.token_ids, other.token_ids)
        num_common = min(num_equal - self._prefixes.lookahead, len(key.token_ids) - 1)
        return num_common if num_common >= at_least else 0

    def keep(self, lease: RowLease, token_ids: NDArray[np.int64], num_tokens: int) -> None:
        """Gives the KV of the row's first `num_tokens` tokens to the prefix cache, for other rows with the same tokens.

        `token_ids` [N] int64 are the row's tokens. Their KV must be in the pool: no work that writes it is left. KV
        that also depends on tokens after `token_ids` is not given. Does nothing if the row uses no cache, or `forget`
        was called for it.

        If the cache has the KV of some of these tokens already, the row uses the cache's slots from now on, and its own
        slots for these tokens become free. But the row keeps its own slots if stream work uses it now, or if the pool
        is in shared memory.
        """
        if lease.prefix is None or lease.is_damaged:
            return
        for window in self.windows.values():
            window.settle(lease.row, num_tokens)
        lookahead, start = self._prefixes.lookahead, lease.prefix.num_tokens
        stop = min(num_tokens, len(token_ids) - lookahead)
        if stop <= start:
            return
        self.num_changes += 1
        tokens, slots = token_ids[start : stop + lookahead], lease.slots[start:stop]
        num_there = self._prefixes.insert(lease.prefix, tokens, slots)
        if num_there and lease.prefix.num_tokens == stop:
            if self._may_adopt(lease, start, start + num_there):
                self._adopt(lease, start, start + num_there)
                num_there = 0
            else:
                lease.duplicates.append(slice(start, start + num_there))
        lease.share(slice(start + num_there, stop))

    def _may_adopt(self, lease: RowLease, start: int, stop: int) -> bool:
        assert lease.prefix is not None
        if self._memory is not None or lease.is_in_use:
            return False
        kept = lease.prefix.slots()[start:stop]
        return all(window.may_replace(kept) for window in self.windows.values())

    def _adopt(self, lease: RowLease, start: int, stop: int) -> None:
        """Frees the row's slots for the tokens [start, stop), and gives it the prefix tree's slots for them instead."""
        assert lease.prefix is not None
        own, slots = lease.slots[start:stop].copy(), lease.prefix.slots()[start:stop]
        self._columns.slots[lease.row, start:stop] = slots
        self.rows.write(lease.row, start, slots)
        for window in self.windows.values():
            window.replace(lease.row, start, own, slots)
        self._give_back(own)

    def forget(self, lease: RowLease) -> None:
        """Makes the prefix cache forget everything that begins like the row's cached KV, because it may be damaged.

        The row gives no more KV to the cache.
        """
        lease.is_damaged = True
        if lease.prefix is not None:
            self._prefixes.forget(lease.prefix)

    def _hold(self, key: CacheKey | None, max_tokens: int, *, received: int | None) -> HeldPrefix | None:
        if key is None or not self._caches:
            return None
        if self.windows:
            prefix = self._prefixes.match(key.token_ids, key.namespace)
            max_tokens = self._num_usable(prefix.slots()[:max_tokens], received)
        return self._prefixes.hold(key.token_ids, key.namespace, max_tokens)

    def _num_usable(self, slots: Slots, received: int | None = None) -> int:
        """Returns how many tokens of a cached prefix, with `slots`, can be used in all groups that have a window.

        If the other KV comes from another service, `received` is the row's number of tokens.
        """
        num_usable = len(slots)
        while True:
            slots = slots[:num_usable]
            for window in self.windows.values():
                num = window.num_usable(slots) if received is None else window.num_replaceable(slots, received)
                num_usable = min(num_usable, num)
            if num_usable == len(slots):
                return num_usable

    def _let_go(self, prefix: HeldPrefix | None) -> None:
        if prefix is not None:
            self._prefixes.let_go(prefix)

    def _take(self, num_slots: int, num_spared: int = 0) -> Slots | None:
        """Returns [num_slots] slots, evicted ones if too few are free. Returns None if fewer than `num_spared` would be
        left.
        """
        if num_slots + num_spared > self.num_free_slots:
            return None
        if (num_short := num_slots - self._slots.num_free) > 0:
            self._give_back(self._prefixes.evict(num_short))
            self.prefix_counts = replace(self.prefix_counts, num_evicted=self.prefix_counts.num_evicted + num_short)
        return self._slots.take(num_slots)

    def _give_back(self, slots: Slots) -> None:
        for window in self.windows.values():
            window.drop(slots)
        self._slots.give_back(slots)

    def lacks(
        self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64], *, leaving: Iterable[RowLease] | None = None
    ) -> bool:
        """Returns whether too few slots are free to `grow` the rows. Shapes: rows, num_tokens [B].

        With `leaving`, the slots of these rows count as free, and those of rows in quarantine too.
        """
        leases = [] if leaving is None else [*leaving, *self._quarantined.values()]
        num_free = self.num_free_slots + self._num_coming(leases)
        return int(self._missing(rows, num_tokens).sum()) > num_free or self._lacks_windows(rows, num_tokens, leases)

    def has_room(
        self, num_tokens: int, *, num_cached: int, num_rows: int, num_spared: int, leaving: Sequence[RowLease]
    ) -> bool:
        """Returns whether `num_rows` rows, and the slots for one row of `num_tokens` tokens, would be free if the rows
        `leaving` and those in quarantine were reclaimed. The first `num_cached` of the tokens need no slots, and
        `num_spared` slots must stay free.
        """
        leases = [*leaving, *self._quarantined.values()]
        rows = [lease.row for lease in leases]
        return (
            num_rows <= self.rows.num_free + len(rows)
            and num_tokens - num_cached + num_spared <= self.num_free_slots + self._num_coming(leases)
            and all(
                window.may_promise(num_tokens, num_spared, num_more=window.num_promised(rows))
                for window in self.windows.values()
            )
        )

    def _lacks_windows(
        self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64], leaving: Sequence[RowLease] = ()
    ) -> bool:
        return any(
            window.num_missing(rows, num_tokens)
            > window.num_unpromised + window.num_promised(lease.row for lease in leaving)
            for window in self.windows.values()
        )

    def _missing(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many slots `grow` would add to each of `rows` for `num_tokens`. Shapes: all [B]."""
        missing: NDArray[np.int64] = np.maximum(num_tokens - self._columns.num_slots[rows], 0)
        return missing

    def grow(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> bool:
        """Adds slots to each of `rows`, so that it has at least `num_tokens`, and writes them into the token table.

        Returns True if all rows have their slots; False if there are too few, and then no row gets any. Shapes: both
        [B]. The rows must be held and distinct.
        """
        assert self._memory is None, "slots of a row that is lent are not added to"
        if self._lacks_windows(rows, num_tokens):
            return False
        missing = self._missing(rows, num_tokens)
        slots = self._take(int(missing.sum()))
        if slots is None:
            return False
        num_held = self._columns.num_slots[rows]
        positions = (num_held - missing.cumsum() + missing).repeat(missing) + np.arange(len(slots))
        rows_of_slots = rows.repeat(missing)
        self._columns.slots[rows_of_slots, positions] = slots
        self._columns.num_slots[rows] = num_held + missing
        if slots.size:
            self.rows.write_each(rows_of_slots, positions, slots)
        for window in self.windows.values():
            window.promise(rows, num_tokens)
            window.extend(rows, num_tokens)
        return True

    def extend_windows(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
        """Prepares groups with a window for the KV of the rows' tokens up to `num_tokens`. Shapes: both [B].

        `grow` does so by itself. Each call continues where the row's last call ended.
        """
        for name, window in self.windows.items():
            slots = window.extend(rows, num_tokens)
            if self._memory is not None:
                self._memory.stamp(name, slots)

    def leave_behind(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64], *, at_least: int = 1) -> None:
        """Notes that the rows' first `num_tokens` tokens are computed. Shapes: both [B]. The rows must be distinct.

        In groups with a window, the slots of tokens that later tokens do not attend may then be reused. No work that
        reads these slots may be left. Rows with fewer than `at_least` such tokens are left as they are.
        """
        for window in self.windows.values():
            window.leave(rows, num_tokens, at_least=at_least)

    def first_kept(self, group_name: str, num_tokens: int) -> int:
        """Returns the first position whose KV a row of `num_tokens` keeps in this group. It is the same in both
        services.
        """
        return self.windows[group_name].first_kept(num_tokens) if group_name in self.windows else 0

    def windows_beside(self, group_name: str) -> tuple[WindowKv, ...]:
        """Returns the KV of the layers with a window that a forward uses besides the KV of this group."""
        return self._target_windows if group_name == TARGET_GROUP else ()

    def slots_of(self, lease: RowLease, group_name: str, positions: slice) -> Slots:
        """Returns the slots of a row's tokens in the buffer of a group. If the group has a window, `positions` must be
        in it.
        """
        window = self.windows.get(group_name)
        return lease.slots[positions] if window is None else window.slots(lease.row, positions)

    def move_kv(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies the target's KV of slots `sources` [N] to slots `destinations` [N], all reads before all writes.

        Unlike the other methods it runs on the forward stream, as part of a forward that uses the slots.
        """
        for name, shards in self.shards.items():
            if name == DRAFT_GROUP:
                continue
            window = self.windows.get(name)
            slots = [each if window is None else window.slot_of[each] for each in (sources, destinations)]
            with across_devices([shard.kv for shard in shards]):
                for kv in (shard.kv for shard in shards):
                    from_slots, to_slots = (each.to(kv.device, non_blocking=True) for each in slots)
                    kv.index_copy_(2, to_slots, kv.index_select(2, from_slots))

    def use_until(self, rows: NDArray[np.int64], event: Event, stream: Stream) -> None:
        """Notes that work on `stream` uses `rows` [B] until `event`. They are reclaimed only after that."""
        self._columns.use_until(rows, event, stream)

    def release(self, lease: RowLease) -> None:
        """Releases a row and its slots. They stay in quarantine until `reclaim` finds that no stream work uses them any
        more. A second call does nothing.
        """
        if not lease.is_held:
            return
        self.num_changes += 1
        lease.state = LeaseState.QUARANTINED
        del self._held[lease.row]
        self._quarantined[lease.row] = lease

    def reclaim(self) -> int:
        """Frees the quarantined rows that no stream work uses any more. Returns how many rows it freed."""
        done = [lease for lease in self._quarantined.values() if not lease.is_in_use]
        for lease in done:
            del self._quarantined[lease.row]
            self._leave_windows(lease)
            self._give_back(lease.own_slots)
            self._let_go(lease.prefix)
            lease.state = LeaseState.FREE
            self._columns.clear(lease.row)
            self.rows.give_back(lease.row)
        self.num_changes += len(done)
        return len(done)

    def _leave_windows(self, lease: RowLease) -> None:
        """Ends a row's windows. KV of a window that the row has and the prefix cache lacks goes to the cache."""
        for window in self.windows.values():
            window.release(lease.row)
        if lease.prefix is None or lease.is_damaged or not lease.duplicates or not self.windows:
            return
        kept = lease.prefix.slots()
        for window in self.windows.values():
            for positions in lease.duplicates:
                window.inherit(lease.slots[positions], kept[positions])

    def row_counts(self) -> PoolCounts:
        """Returns how many rows are in each state."""
        return _counts(self.rows.max_rows, self.rows.num_free, self._columns.rows_by_state())

    def slot_counts(self) -> PoolCounts:
        """Returns how many slots are in each state. A slot has the state of its row.

        Slots of the prefix cache are `cached` if no row holds them, and otherwise `running`.
        """
        counts = _counts(self.num_slots, self._slots.num_free, self._columns.slots_by_state())
        num_cached = self._prefixes.num_evictable
        num_held = self._prefixes.num_slots - num_cached
        return replace(counts, running=counts.running + num_held, cached=num_cached)

    def window_counts(self) -> dict[str, PoolCounts]:
        """Returns how many slots of each group with a window are in each state (see `WindowSlots.counts`)."""
        return {name: window.counts() for name, window in self.windows.items()}

    def _num_coming(self, leaving: Sequence[RowLease]) -> int:
        """Returns how many more slots rows can get once these leases are reclaimed."""
        prefixes = [lease.prefix for lease in leaving if lease.prefix is not None]
        return sum(len(lease.own_slots) for lease in leaving) + self._prefixes.num_held_only_by(prefixes)

    def check_conservation(self) -> None:
        """Checks that every row is either free or held by exactly one lease, and every slot free, a lease's own or the
        prefix tree's, else raises AssertionError.

        Takes time in proportion to the number of slots.
        """
        leases = [*self._held.values(), *self._quarantined.values()]
        places = np.concatenate([self._slots.free, self._prefixes.slots, *(lease.own_slots for lease in leases)])
        assert PADDING_SLOT < places.min(initial=1) <= places.max(initial=1) <= self.num_slots, (
            "slots that do not exist"
        )
        num_places = np.bincount(places, minlength=self.num_slots + 1)[PADDING_SLOT + 1 :]
        assert np.all(num_places == 1), (
            f"slots are lost or held twice: {len(places)} placed, {np.count_nonzero(num_places)} distinct, "
            f"{self.num_slots} exist"
        )
        assert self.rows.num_free + len(leases) == self.rows.max_rows, (
            f"rows: {self.rows.num_free} free + {len(leases)} held or quarantined != {self.rows.max_rows}"
        )
        self._columns.check_counts()
        self._prefixes.check()
        for window in self.windows.values():
            window.check(lease.row for lease in leases)
        for lease in leases:
            table = self.rows.req_to_token[lease.row, : lease.num_tokens].cpu().numpy()
            assert np.array_equal(table, lease.slots), f"row {lease.row}: the table disagrees with the lease"


def _new_shards(
    groups: Sequence[LayerGroupSpec],
    num_slots: Mapping[str, int],
    tensors: PoolTensors,
) -> dict[str, Sequence[KvShard]]:
    shapes = {group.name: _shape(group, num_slots[group.name]) for group in groups}
    num_bytes = sum(math.prod(shapes[group.name]) * _dtype(group).itemsize for group in groups)
    try:
        if tensors.torch_device.type == "cpu":
            require_room(num_bytes)
        return {group.name: tensors.kv(group.name, shapes[group.name], _dtype(group)) for group in groups}
    except NoRoomForShard as error:
        needed = f"need a shard of {error.num_bytes / 2**30:,.1f} GiB on {error.torch_device}, which is"
        raise StartupError(
            f"max_kv_tokens: {max(num_slots.values())} tokens {needed} not to be had: {error}"
        ) from error
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        needed = f"take {num_bytes / 2**30:,.1f} GiB on {tensors.torch_device}, which are"
        raise StartupError(
            f"max_kv_tokens: {max(num_slots.values())} tokens {needed} not to be had: {error}"
        ) from error


def _shape(group: LayerGroupSpec, num_slots: int) -> tuple[int, ...]:
    return (group.num_layers, group.num_planes, num_slots + 1, group.num_heads, group.head_dim)


def _dtype(group: LayerGroupSpec) -> torch.dtype:
    dtype: torch.dtype = torch.uint8 if group.dtype == KV_FP8 else getattr(torch, group.dtype)
    return dtype


def _view(memory: SharedPool, group: LayerGroupSpec) -> Tensor:
    values = torch.from_numpy(memory.groups[group.name]).view(_dtype(group))
    shape = (*values.shape[:3], group.num_heads, group.head_dim)
    return values.view(shape)


def _counts(total: int, free: int, by_state: Sequence[int]) -> PoolCounts:
    reserved, transferring, running, quarantined, _ = by_state
    return PoolCounts(total, free, reserved, transferring, running, quarantined)
