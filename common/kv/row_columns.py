"""What the host knows of each pool row, as columns addressed by row: a step asks for all rows of a batch at once."""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from common.device.stream import Event, Stream


class LeaseState(Enum):
    RESERVED = "reserved"
    TRANSFERRING = "transferring"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    FREE = "free"

    __hash__ = object.__hash__  # that of Enum is Python, and every step counts rows and slots by state


_NUMBERS = {state: number for number, state in enumerate(LeaseState)}


class RowColumns:
    """`num_slots` [rows] int64: held by each, also in quarantine; 0 for the others.

    Stream work that touches a row ends with the events noted here, of each stream the last: all others are before it.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_slots = np.zeros(num_rows, dtype=np.int64)
        self._states = np.full(num_rows, _NUMBERS[LeaseState.FREE])
        self._used_until: dict[Stream, NDArray[np.object_]] = {}

    def set_state(self, row: int, state: LeaseState) -> None:
        self._states[row] = _NUMBERS[state]

    def rows_by_state(self) -> dict[LeaseState, int]:
        """The padding row counts as free."""
        return dict(zip(LeaseState, np.bincount(self._states, minlength=len(_NUMBERS)).tolist(), strict=True))

    def slots_by_state(self) -> dict[LeaseState, int]:
        sums = np.bincount(self._states, weights=self.num_slots, minlength=len(_NUMBERS))
        return dict(zip(LeaseState, sums.astype(np.int64).tolist(), strict=True))

    def use_until(self, rows: int | NDArray[np.int64], event: Event, stream: Stream) -> None:
        if stream not in self._used_until:
            self._used_until[stream] = np.full(self.num_slots.shape, None)
        self._used_until[stream][rows] = event

    def is_in_use(self, row: int) -> bool:
        return not all(column[row] is None or column[row].is_done() for column in self._used_until.values())

    def clear(self, row: int) -> None:
        """Nobody's any more."""
        self.num_slots[row] = 0
        for column in self._used_until.values():
            column[row] = None
