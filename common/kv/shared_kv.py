"""A segment's KV where it lies: in slots of another process's pool, which this one has mapped or can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

MAX_LENT_BYTES = 64 << 20
"""Of a segment that is not copied: a part of the receiver's budget, so that the next is there when it has landed."""


@dataclass(frozen=True, slots=True)
class PoolTicket:
    """Token i lies in slot `slots[i]`, which is its row's for as long as its stamp is `generation`.

    `number` names the segment when it is given back. Neither number is ever used again in the same pool.
    """

    slots: tuple[int, ...]
    generation: int
    number: int

    def is_of(self, num_slots: int) -> bool:
        """Whether a pool of so many has such slots."""
        return min(self.slots, default=1) >= 1 and max(self.slots, default=1) <= num_slots


@dataclass(frozen=True, slots=True)
class SharedKv:
    """`layers` [layers, planes, slots, row_bytes] uint8: the part of the pool it is of; `stamps` [slots] uint64."""

    ticket: PoolTicket
    layers: NDArray[np.uint8]
    stamps: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        num_layers, num_planes, _, row_bytes = self.layers.shape
        return int(num_layers * num_planes * len(self.ticket.slots) * row_bytes)

    @property
    def is_current(self) -> bool:
        """Whether the slots are still the row's. What was read before counts only if this still holds."""
        return bool((self.stamps[np.array(self.ticket.slots)] == self.ticket.generation).all())


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """KV that must be fetched. `kv`, `stamps` [N, 2] uint64: (address, bytes) of ranges of the other process's memory,
    those of [layers, planes, slots, row_bytes], which is `shape`, and those of [slots] uint64.
    """

    ticket: PoolTicket
    shape: tuple[int, int, int, int]
    kv: NDArray[np.uint64]
    stamps: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape)


def runs_of(slots: Sequence[int]) -> tuple[list[int], list[int]]:
    """The slots as ranges, in their order: the first of each, and their lengths."""
    numbers = np.array(slots, np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
    return numbers[starts].tolist(), np.diff(starts, append=len(numbers)).tolist()


def slots_of(starts: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """What `runs_of` made ranges of. The caller knows that they are not too many."""
    runs = (range(start, start + length) for start, length in zip(starts, lengths, strict=True))
    return tuple(chain.from_iterable(runs))
