"""A segment's KV that is not copied: it lies in slots of another process's pool, mapped here or readable from here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

MAX_LENT_BYTES = 64 << 20
"""The largest lent segment. It is a part of the receiver's budget, so that the next segment is there when it has
landed.
"""


@dataclass(frozen=True, slots=True)
class PoolTicket:
    """Token i lies in slot `slots[i]`, which belongs to its row as long as the slot's stamp is `generation`.

    `number` names the segment when it is returned. Neither number is ever reused in the same pool.
    """

    slots: tuple[int, ...]
    generation: int
    number: int

    def is_of(self, num_slots: int) -> bool:
        """Whether a pool of so many slots has these."""
        return min(self.slots, default=1) >= 1 and max(self.slots, default=1) <= num_slots


@dataclass(frozen=True, slots=True)
class SharedKv:
    """`layers` [layers, planes, slots, row_bytes] uint8 is the part of the pool; `stamps` [slots] uint64."""

    ticket: PoolTicket
    layers: NDArray[np.uint8]
    stamps: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        num_layers, num_planes, _, row_bytes = self.layers.shape
        return int(num_layers * num_planes * len(self.ticket.slots) * row_bytes)

    @property
    def is_current(self) -> bool:
        """Whether the slots still belong to the row. What was read before counts only if this is still true."""
        return bool((self.stamps[np.array(self.ticket.slots)] == self.ticket.generation).all())


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """KV that must be fetched. `kv` and `stamps` [N, 2] uint64 are (address, bytes) ranges of the other process's
    memory: those of [layers, planes, slots, row_bytes], which is `shape`, and those of [slots] uint64.
    """

    ticket: PoolTicket
    shape: tuple[int, int, int, int]
    kv: NDArray[np.uint64]
    stamps: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape)


def runs_of(slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """The slots as ranges, in order: each range's first slot, and its length."""
    numbers = np.array(slots, np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
    return numbers[starts].tolist(), np.diff(starts, append=len(numbers)).tolist()


def slots_of(starts: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """The slots of the ranges that `runs_of` made. The caller has checked their number."""
    runs = (range(start, start + length) for start, length in zip(starts, lengths, strict=True))
    return tuple(chain.from_iterable(runs))
