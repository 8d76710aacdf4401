"""Mutants of the slots of windows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from common.kv.pool import KvPool, RowLease
from common.kv.slot_allocator import Slots
from common.kv.window_slots import WindowSlots
from tests.engine.mutants.kinds import instead_of

Extend = Callable[[WindowSlots, Slots, Slots], Slots]


def _free_idle_slots_at_once(patch: pytest.MonkeyPatch) -> None:
    """Frees a slot as soon as its token is in no window. The cache then finds less, and nothing becomes wrong."""
    let_go = WindowSlots._let_go

    def mutant(self: WindowSlots, slots: Slots) -> None:
        let_go(self, slots)
        self.drop(self._owner[slots[self._num_users[slots] == 0]])

    patch.setattr(WindowSlots, "_let_go", mutant)


def tokens_leave_a_window_too_early(patch: pytest.MonkeyPatch) -> None:
    """Frees the slots of tokens that are behind the window of a later token, and still in that of the next one."""
    _free_idle_slots_at_once(patch)
    leave_behind = KvPool.leave_behind

    def mutant(self: KvPool, rows: NDArray[np.int64], num_tokens: NDArray[np.int64], *, at_least: int = 1) -> None:
        leave_behind(self, rows, num_tokens + 3, at_least=at_least)

    patch.setattr(KvPool, "leave_behind", mutant)


def tokens_never_leave_a_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvPool, "leave_behind", lambda *_, **__: None)


@instead_of(KvPool, "release")
def windows_end_with_their_requests(release: Callable[..., None], self: KvPool, lease: RowLease) -> None:
    """Ends a row's windows when its request ends, and not when no work uses the row any more."""
    if lease.is_held:
        for window in self.windows.values():
            window.release(lease.row)
    release(self, lease)


@instead_of(WindowSlots, "extend")
def stale_translation(extend: Extend, self: WindowSlots, rows: Slots, num_tokens: Slots) -> Slots:
    """Does not note that a slot of the pool has another slot here, if it had one before."""
    before = self.slot_of.clone()
    slots = extend(self, rows, num_tokens)
    stale = ((before != self.slot_of) & (before > 0)).nonzero().flatten()
    if len(stale):
        self.slot_of.index_copy_(0, stale, before[stale])
    return slots


def prefix_is_used_without_its_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowSlots, "num_usable", lambda self, slots: len(slots))


@instead_of(WindowSlots, "extend")
def kv_is_found_before_it_is_there(extend: Extend, self: WindowSlots, rows: Slots, num_tokens: Slots) -> Slots:
    """Lets the prefix cache find a token's KV as soon as it has a slot."""
    slots = extend(self, rows, num_tokens)
    for row, num in zip(rows.tolist(), num_tokens.tolist(), strict=True):
        self.settle(row, num)
    return slots


@instead_of(KvPool, "move_kv")
def drafts_move_without_their_windows(_: object, self: KvPool, sources: Tensor, destinations: Tensor) -> None:
    """Moves accepted drafts' KV to their places in the groups without a window only."""
    kv = self.buffers["target"]
    kv.index_copy_(2, destinations, kv.index_select(2, sources))


def promises_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Admits rows whatever other rows were promised."""
    patch.setattr(WindowSlots, "may_promise", lambda self, num_tokens, num_spared: True)
