"""The KV of a segment that is not sent in a message, but read from the slots of another process's pool.

The pool is mapped into this process, or NIXL reads from it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_LENT_BYTES = 64 << 20
"""The largest segment, in bytes, that a sender lends instead of sending it.

It is a fraction of the receiver's budget, so that the next segment can arrive while this one is copied.
"""


@dataclass(frozen=True, slots=True)
class PoolTicket:
    """Says in which slots of the sender's pool a segment's KV lies. Token i lies in slot `slots[i]`.

    A slot still has the segment's KV as long as its stamp in the pool is at most `generation`: a pool makes a new and
    larger stamp each time it gives slots to a row, and `generation` is the newest when the segment was lent. `number`
    identifies the segment when the receiver gives it back; a pool never uses a number twice.
    """

    slots: tuple[int, ...]
    generation: int
    number: int

    def is_of(self, num_slots: int) -> bool:
        """Returns True if all slots of this ticket exist in a pool of `num_slots` slots."""
        return min(self.slots, default=1) >= 1 and max(self.slots, default=1) <= num_slots


@dataclass(frozen=True, slots=True)
class SharedKv:
    """KV of a segment in memory of this process: a mapped pool, or a copy that NIXL fetched.

    `layers` [layers, planes, slots, row_bytes] uint8 may hold more slots than the segment has; the ticket says which
    ones to read. `stamps` [slots] uint64 has the stamp of each slot.
    """

    ticket: PoolTicket
    layers: NDArray[np.uint8]
    stamps: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        num_layers, num_planes, _, row_bytes = self.layers.shape
        return int(num_layers * num_planes * len(self.ticket.slots) * row_bytes)

    @property
    def is_current(self) -> bool:
        """True if the slots still have the segment's KV. Check it after reading: if False, discard the data."""
        return bool((self.stamps[np.array(self.ticket.slots)] <= self.ticket.generation).all())


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """KV of a segment that must be fetched from another process's memory, for example by NIXL.

    `fetch` fetches it, and raises PoolLost if that fails. `kv` and `stamps` [N, 2] uint64 are ranges of that memory,
    each (address, number of bytes). The bytes of all `kv` ranges together are an array of `shape`, [layers, planes,
    slots, row_bytes]. Those of all `stamps` ranges are [slots] uint64.
    """

    ticket: PoolTicket
    shape: tuple[int, int, int, int]
    kv: NDArray[np.uint64]
    stamps: NDArray[np.uint64]
    fetch: Callable[[RemoteKv], Awaitable[SharedKv]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape)


class ReadablePool(Protocol):
    """Another process's KV pool, readable from this one. Its layer groups are those of this process's pool."""

    secret: bytes
    """Only processes that can read the pool know it."""

    def in_use(self) -> AbstractContextManager[None]:
        """Keeps the pool readable while the block runs."""

    def read(self, group_name: str, layers: slice, ticket: PoolTicket) -> SharedKv | RemoteKv | None:
        """Returns where the KV of a segment lies: the `layers` of a group, in the ticket's slots. It copies nothing.

        A SharedKv can be read in place; a RemoteKv must be fetched. Returns None if the pool does not have these slots.
        """


class PoolLost(Exception):
    """A pool of another process cannot be read any more."""


def runs_of(slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the slots as ranges of adjacent slots, in order: the first slot of each range, and the length of each."""
    numbers = np.array(slots, np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
    return numbers[starts].tolist(), np.diff(starts, append=len(numbers)).tolist()


def slots_of(starts: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns the slots of the ranges that `runs_of` made. The caller checks first that there are not too many."""
    runs = (range(start, start + length) for start, length in zip(starts, lengths, strict=True))
    return tuple(chain.from_iterable(runs))
