"""Memory that a KV pool lies in so that others can read there: its layout, and the side that writes it.

The prefill service alone writes. Each slot has a stamp: the number of the row, of all rows there ever were, that it
belongs to. A receiver shows the secret with each call: it proves that it can read.

    | secret | number of slots | stamp of each slot ... | layer group | layer group ...
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_kv import PoolTicket, SharedKv

SECRET_BYTES = 16
NUMBER_BYTES = 8
HEADER_BYTES = SECRET_BYTES + NUMBER_BYTES
_PAGE_BYTES = 4096


class PoolUnusable(Exception):
    """There is no such memory that can be read from here, or it is not one that this process may trust."""


class PoolLayout:
    """Where everything is. `groups` [layers, planes, slots + 1, row_bytes]; slot 0 is padding, and nobody's."""

    def __init__(self, groups: Sequence[LayerGroupSpec], num_slots: int) -> None:
        self.num_slots = num_slots
        self.shapes = {
            group.name: (group.num_layers, group.num_planes, num_slots + 1, group.row_bytes) for group in groups
        }
        self.starts: dict[str, int] = {}
        """Of each group, in bytes from the beginning."""
        end = HEADER_BYTES + (num_slots + 1) * NUMBER_BYTES
        for name, (num_layers, num_planes, num_rows, row_bytes) in self.shapes.items():
            self.starts[name] = -(-end // _PAGE_BYTES) * _PAGE_BYTES
            end = self.starts[name] + num_layers * num_planes * num_rows * row_bytes
        self.num_bytes = end

    def stamps(self, memory: mmap.mmap) -> NDArray[np.uint64]:
        return np.frombuffer(memory, np.uint64, self.num_slots + 1, HEADER_BYTES)

    def group(self, memory: mmap.mmap, name: str) -> NDArray[np.uint8]:
        shape = self.shapes[name]
        return np.frombuffer(memory, np.uint8, int(np.prod(shape)), self.starts[name]).reshape(shape)


def split_header(header: bytes) -> tuple[bytes, int]:
    """The secret and the number of slots."""
    return header[:SECRET_BYTES], int.from_bytes(header[SECRET_BYTES:HEADER_BYTES], "little")


class LentPool:
    """The writer's side. Not thread-safe. The memory stays as long as anything that it gave out."""

    def __init__(self, memory: mmap.mmap, layout: PoolLayout) -> None:
        """`memory` has the layout's bytes, zeros."""
        self.secret = secrets.token_bytes(SECRET_BYTES)
        memory[:HEADER_BYTES] = self.secret + layout.num_slots.to_bytes(NUMBER_BYTES, "little")
        self.groups = {name: layout.group(memory, name) for name in layout.shapes}
        """[layers, planes, num_slots + 1, row_bytes] uint8, zeros at first."""
        self._stamps = layout.stamps(memory)
        self._num_stamped = 0
        self._num_tickets = 0

    @property
    def num_slots(self) -> int:
        return len(self._stamps) - 1

    def stamp(self, slots: Sequence[int]) -> int:
        """Give these slots to a row. Whoever read there for another row learns it. Returns the row's generation."""
        self._num_stamped += 1
        self._stamps[np.array(slots, np.int64)] = self._num_stamped
        return self._num_stamped

    def lend(self, group_name: str, layers: slice, slots: Sequence[int], generation: int) -> SharedKv:
        """KV of a row that `stamp` gave the slots to, for a receiver to read."""
        self._num_tickets += 1
        ticket = PoolTicket(tuple(slots), generation, self._num_tickets)
        return SharedKv(ticket, self.groups[group_name][layers], self._stamps)
