"""The slots of a layer group whose layers attend a sliding window: a row has them for its last tokens only.

    token in the pool ──extend──▶ in a row's window ──leave──▶ idle ──taken for another token──▶ not here
                                         ▲                      │
                                         └──────── hold ────────┘

A token's slot in this group is found by its slot in the pool. So rows that share a prefix share these slots too. When a
token has left the windows of all rows, its slot is idle: the prefix cache still finds its KV, until another token needs
the slot. KV is found only once it is known to be written: when its token leaves a window, or by `settle`.

Each row is promised slots for its window and for the tokens of steps in flight, or for all its tokens if they are
fewer. Together the promises never exceed the slots, so `extend` always finds one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.device.upload import upload_array
from common.kv.rows import NewZeros, RowColumns
from common.kv.slot_allocator import PADDING_SLOT, SlotAllocator, Slots
from common.telemetry.stats import PoolCounts

_EVICTED_SHARE = 32
"""At least 1 / this of the slots becomes free at once, because it takes time to find those that are idle longest."""


@dataclass(frozen=True, slots=True)
class WindowKv:
    """The KV of the target's `layers` that attend the same window, and where each token's KV lies.

    `kv` [layers, 2, slots + 1, heads, head_dim]. `req_to_token` [rows, tokens] int64 has the slot in `kv` of each token
    in a row's window, and `slot_of` [pool's slots + 1] int64 that of each slot of the pool that a forward in flight
    writes.
    """

    kv: Tensor
    req_to_token: Tensor
    slot_of: Tensor
    layers: tuple[int, ...]


class WindowSlots:
    """The slots 1..num_slots of one window group; slot 0 is padding.

    The token at position p attends positions p - window + 1 to p, and rows keep `num_kept_before` tokens before these.
    A row writes at most `num_in_flight` tokens past those that are known to be computed. `columns` has the pool's slots
    of each row.

    `table` [rows, tokens] int64 has the group's slot of each token of each row, and `slot_of` [pool's slots + 1] int64
    that of each slot of the pool. Both are on the device. For tokens outside the windows they are out of date, and
    nobody reads them; `slot_of` is read only for tokens that a forward writes.
    """

    def __init__(
        self,
        *,
        window: int,
        num_kept_before: int,
        num_slots: int,
        num_in_flight: int,
        num_pool_slots: int,
        columns: RowColumns,
        new_zeros: NewZeros,
    ) -> None:
        num_rows, num_tokens = columns.slots.shape
        self.window = window
        self.num_slots = num_slots
        self._num_kept_before = num_kept_before
        self.row_slots = row_slots(window, num_kept_before=num_kept_before, num_in_flight=num_in_flight)
        self.table = new_zeros((num_rows, num_tokens), torch.int64)
        self.slot_of = new_zeros((num_pool_slots + 1,), torch.int64)
        self._places = self.table.view(-1)
        self._columns = columns
        self._free = SlotAllocator(num_slots)
        self._slot_of = np.zeros(num_pool_slots + 1, np.int64)
        self._owner = np.zeros(num_slots + 1, np.int64)  # the pool's slot, 0 if it is free
        self._num_users = np.zeros(num_slots + 1, np.int64)  # rows in whose window it is
        self._is_settled = np.zeros(num_slots + 1, np.bool_)  # its KV is there
        self._left_at = np.zeros(num_slots + 1, np.int64)  # when it last left a window, by the clock
        self._starts = np.zeros(num_rows, np.int64)  # a row's window are the positions [start, stop)
        self._stops = np.zeros(num_rows, np.int64)
        self._promised = np.zeros(num_rows, np.int64)
        self._num_promised = 0
        self._clock = 0

    @property
    def num_unpromised(self) -> int:
        return self.num_slots - self._num_promised

    def counts(self) -> PoolCounts:
        """Returns how many slots rows have in their windows (`running`), and how many more they are promised
        (`reserved`).

        A slot that rows share counts for each of them. The others are `free`: they may have KV that the prefix cache
        finds.
        """
        num_held = int((self._stops - self._starts).sum())  # each step reads it: no pass over the slots
        return PoolCounts(
            total=self.num_slots,
            free=self.num_unpromised,
            reserved=self._num_promised - num_held,
            running=num_held,
        )

    def num_missing(self, rows: Slots, num_tokens: Slots) -> int:
        """Returns how many slots `promise` would promise. Shapes: both [B]."""
        return int(self._missing(rows, num_tokens).sum())

    def may_promise(self, num_tokens: int, num_spared: int, *, num_more: int = 0) -> bool:
        """Whether a new row of `num_tokens` may be promised its slots, if first `num_more` promised slots came back.

        Then `num_spared` slots must be left, or as many as all rows may still be promised, if these are fewer.
        """
        needed = min(num_tokens, self.row_slots)
        num_promised = self._num_promised - num_more
        num_growing = self.row_slots * (len(self._promised) - 1) - num_promised - needed  # row 0 is padding
        return needed + min(num_spared, num_growing) <= self.num_slots - num_promised

    def num_promised(self, rows: Iterable[int]) -> int:
        """Returns how many slots are promised to `rows`."""
        return int(self._promised[list(rows)].sum())

    def promise(self, rows: Slots, num_tokens: Slots) -> None:
        """Promises each of `rows` the slots that it needs to have `num_tokens` tokens. Shapes: both [B].

        At most `num_unpromised` may be missing. The rows must be distinct.
        """
        missing = self._missing(rows, num_tokens)
        self._promised[rows] += missing
        self._num_promised += int(missing.sum())
        assert self._num_promised <= self.num_slots, "more slots are promised than there are"

    def _missing(self, rows: Slots, num_tokens: Slots) -> Slots:
        missing: Slots = np.maximum(np.minimum(num_tokens, self.row_slots) - self._promised[rows], 0)
        return missing

    def num_usable(self, slots: Slots) -> int:
        """Returns how many tokens of a cached prefix can be used: the most after which the next token finds its whole
        window.

        `slots` [N] are the pool's slots of the prefix.
        """
        lengths = np.arange(len(slots) + 1)
        is_missing = ~self._is_settled[self._slot_of[slots]]
        num_before = np.concatenate([[0], np.maximum.accumulate(np.where(is_missing, lengths[1:], 0))])
        return int(np.flatnonzero(num_before <= np.maximum(lengths - self.window + 1, 0))[-1])

    def num_replaceable(self, slots: Slots, num_tokens: int) -> int:
        """Returns how many tokens of a cached prefix a row of `num_tokens` can use if it receives all other KV.

        `slots` [N] are the pool's slots of the prefix. If the group lacks KV of the row's window, all KV of this window
        is received anew, unless other rows have some of it in their windows: then only the tokens before the first gap
        can be used.
        """
        start = self.first_kept(num_tokens)
        places = self._slot_of[slots[start:]]
        if self._is_settled[places].all() or not self._num_users[places].any():
            return len(slots)
        return start + int(np.argmin(self._is_settled[places]))

    def first_kept(self, num_tokens: int) -> int:
        """Returns the first position whose KV is kept when `num_tokens` are computed."""
        return max(0, num_tokens - self.window + 1 - self._num_kept_before)

    def hold(self, row: int, num_cached: int, *, received: int | None) -> int:
        """Begins the window of a new row whose first `num_cached` tokens are cached in the pool.

        Returns `num_cached` if this group has the KV of those in the window. Otherwise returns 0, and that KV must be
        received too. `received` is the row's number of tokens if KV is received, else None.
        """
        start = max(0, num_cached - self.window + 1) if received is None else self.first_kept(received)
        owners = self._columns.slots[row, start:num_cached]
        slots = self._slot_of[owners]
        self._starts[row] = self._stops[row] = start
        if not self._is_settled[slots].all():
            self.drop(owners)
            return 0
        self._stops[row] = start + len(slots)
        self._num_users[slots] += 1
        on_device = upload_array(slots, self.table.device)
        self._write(np.full(len(slots), row), np.arange(start, num_cached), on_device)
        return num_cached

    def extend(self, rows: Slots, num_tokens: Slots) -> Slots:
        """Extends each row's window to the row's first `num_tokens` tokens. Returns the new tokens' slots, [N].

        Shapes: rows, num_tokens [B]. The rows must be distinct, and the pool must have given them slots for the tokens.
        """
        starts = self._stops[rows]
        stops = np.maximum(starts, num_tokens)
        assert (stops - self._starts[rows] <= self._promised[rows]).all(), "a row takes more than it was promised"
        self._stops[rows] = stops
        rows, positions = _each(rows, starts, stops)
        if not rows.size:
            return positions
        slots, owners = self._take(len(rows)), self._columns.slots[rows, positions]
        self._slot_of[owners], self._owner[slots], self._num_users[slots] = slots, owners, 1
        self._is_settled[slots] = False
        on_device = upload_array(slots, self.slot_of.device)
        self._write(rows, positions, on_device)
        self.slot_of.index_copy_(0, upload_array(owners, self.slot_of.device), on_device)
        return slots

    def leave(self, rows: Slots, num_tokens: Slots, *, at_least: int = 1) -> None:
        """Removes the tokens from each row's window that are not kept when `num_tokens` are computed.

        Rows with fewer than `at_least` such tokens are left as they are. Shapes: both [B]. The rows must be distinct,
        and no work may be left that reads what is removed.
        """
        starts = num_tokens - self.window + 1 - self._num_kept_before
        is_late = starts - self._starts[rows] >= at_least
        if not is_late.any():
            return
        rows, starts = rows[is_late], starts[is_late]
        _, slots = self._slots_of(rows, self._starts[rows], np.minimum(starts, self._stops[rows]))
        self._is_settled[slots] = True
        self._starts[rows] = starts
        self._stops[rows] = np.maximum(self._stops[rows], starts)
        self._let_go(slots)

    def settle(self, row: int, num_tokens: int) -> None:
        """Notes that the KV of the row's first `num_tokens` tokens is written."""
        stop = min(num_tokens, int(self._stops[row]))
        self._is_settled[self._slot_of[self._columns.slots[row, self._starts[row] : stop]]] = True

    def release(self, row: int) -> None:
        """Ends a row's window and takes its promise back."""
        _, slots = self._slots_of(np.array([row]), self._starts[[row]], self._stops[[row]])
        self._let_go(slots)
        self._num_promised -= int(self._promised[row])
        self._starts[row] = self._stops[row] = self._promised[row] = 0

    def may_replace(self, kept: Slots) -> bool:
        """Whether `replace` may be called: no KV of `kept` is on its way."""
        places = self._slot_of[kept]
        return bool((self._is_settled[places] | (places == PADDING_SLOT)).all())

    def replace(self, row: int, start: int, own: Slots, kept: Slots) -> None:
        """Notes that the row's tokens from position `start` on have other slots of the pool: `kept` [N] instead of
        `own` [N].

        Both have KV of the same tokens. Where only `own` has a slot in this group, `kept` gets that slot.
        """
        self.inherit(own, kept)
        slots, others = self._slot_of[own], self._slot_of[kept]
        positions = start + np.flatnonzero((slots != PADDING_SLOT) & (others != PADDING_SLOT))
        positions = positions[(positions >= self._starts[row]) & (positions < self._stops[row])]
        self._num_users[others[positions - start]] += 1
        self._let_go(slots[positions - start])
        on_device = upload_array(others[positions - start], self.table.device)
        self._write(np.full(len(positions), row), positions, on_device)

    def inherit(self, own: Slots, kept: Slots) -> None:
        """Gives this group's slots of `own` [N] to `kept` [N], where `kept` has no KV in this group and none is on its
        way.

        Both are slots of the pool, with KV of the same tokens.
        """
        slots, others = self._slot_of[own], self._slot_of[kept]
        moved = self._is_settled[slots] & ~self._is_settled[others] & (self._num_users[others] == 0)
        own, kept, slots = own[moved], kept[moved], slots[moved]
        self.drop(kept)
        self._slot_of[kept], self._owner[slots], self._slot_of[own] = slots, kept, PADDING_SLOT

    def drop(self, slots: Slots) -> None:
        """Frees this group's slots of tokens whose slots in the pool, `slots` [N], become free."""
        places = self._slot_of[slots]
        self._slot_of[slots] = PADDING_SLOT
        self._give_back(places[places != PADDING_SLOT])

    def slots(self, row: int, positions: slice) -> Slots:
        """Returns the slots of a row's tokens at `positions`, which are in its window."""
        assert self._starts[row] <= positions.start <= positions.stop <= self._stops[row], "not in the row's window"
        return self._slot_of[self._columns.slots[row, positions]]

    def check(self, rows: Iterable[int]) -> None:
        """Checks everything against `rows`, all rows in use, else raises AssertionError. Slow."""
        rows = np.array(list(rows), np.int64)
        starts, stops = self._starts[rows], self._stops[rows]
        num_users = np.zeros_like(self._num_users)
        each, slots = self._slots_of(rows, starts, stops)
        assert slots.all(), "a token in a row's window has no slot"
        np.add.at(num_users, slots, 1)
        assert np.array_equal(num_users, self._num_users), "rows that use a slot are counted wrongly"
        assert np.array_equal(self.table.cpu().numpy()[each], slots), "the table disagrees with the windows"
        owned = np.flatnonzero(self._owner)
        assert np.array_equal(self._slot_of[self._owner[owned]], owned), "a slot is not its owner's"
        assert np.count_nonzero(self._slot_of) == len(owned), "a token has another's slot"
        places = np.sort(np.concatenate([self._free.free, owned]))
        assert np.array_equal(places, np.arange(1, self.num_slots + 1)), "slots of windows are lost or held twice"
        assert (stops - starts <= self._promised[rows]).all(), "a row has more slots than it was promised"
        assert self._promised.sum() == self._promised[rows].sum() == self._num_promised, "promises are counted wrongly"

    def _slots_of(self, rows: Slots, starts: Slots, stops: Slots) -> tuple[tuple[Slots, Slots], Slots]:
        """Returns the places (rows, positions) of the tokens [start, stop) of each row, and their slots: all [N]."""
        places = _each(rows, starts, stops)
        return places, self._slot_of[self._columns.slots[places]]

    def _let_go(self, slots: Slots) -> None:
        self._clock += 1
        np.subtract.at(self._num_users, slots, 1)
        self._left_at[slots] = self._clock

    def _take(self, num_slots: int) -> Slots:
        """Returns [num_slots] free slots. If too few are free, the slots that are idle longest become free first."""
        if (num_short := num_slots - self._free.num_free) > 0:
            idle = np.flatnonzero((self._num_users == 0) & (self._owner != PADDING_SLOT))
            if num_evicted := min(max(num_short, self.num_slots // _EVICTED_SHARE), len(idle)):
                longest = idle[np.argpartition(self._left_at[idle], num_evicted - 1)[:num_evicted]]
                self.drop(self._owner[longest])
        slots = self._free.take(num_slots)
        assert slots is not None, "the promises exceed the slots"
        return slots

    def _give_back(self, slots: Slots) -> None:
        assert not self._num_users[slots].any(), "a slot in a row's window became free"
        self._owner[slots] = PADDING_SLOT
        self._free.give_back(slots)

    def _write(self, rows: Slots, positions: Slots, slots: Tensor) -> None:
        """Writes slots[i], on the device, into row rows[i] of the table, at position positions[i]. Shapes: all [N]."""
        width = self.table.shape[1]
        assert positions.max(initial=0) < width, "written beside its row"
        if rows.size:
            self._places.index_copy_(0, upload_array(rows * width + positions, self.table.device), slots)


def row_slots(window: int, *, num_kept_before: int, num_in_flight: int) -> int:
    """Returns how many slots one row needs at most: its window, what is kept before it, and the tokens in flight."""
    return window + num_kept_before + num_in_flight


def _each(rows: Slots, starts: Slots, stops: Slots) -> tuple[Slots, Slots]:
    """Returns the row and the position of each token [start, stop) of each row. Shapes: all [B]; returns [N] each."""
    counts = np.maximum(stops - starts, 0)
    positions = np.arange(counts.sum()) + np.repeat(starts - counts.cumsum() + counts, counts)
    return np.repeat(rows, counts), positions
