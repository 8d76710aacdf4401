"""The host's data about each row of the pool, as one array per property, so that a step reads a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from common.device.stream import Event, Stream


class LeaseState(Enum):
    """The state of a row of the pool.

    RESERVED: waits for its KV. TRANSFERRING: its KV is sent or received. RUNNING: forwards use it. QUARANTINED: it was
    released, but stream work may still use it. FREE: it may be given to a request.
    """

    RESERVED = "reserved"
    TRANSFERRING = "transferring"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    FREE = "free"


_NUMBERS = {state: number for number, state in enumerate(LeaseState)}


class RowColumns:
    """The slots, the state and the users of each row of the pool, in arrays indexed by row.

    `num_slots` [rows] int64 counts the slots of each row, including rows in quarantine, and `num_shared` [rows] int64
    those of them that belong to the prefix tree. `slots` [rows, tokens] int64 are the slots themselves: row r has the
    first num_slots[r] entries of slots[r]. For each row and stream one event is kept: the end of the last work that
    uses the row.
    """

    def __init__(self, num_rows: int, *, max_tokens_per_row: int) -> None:
        self.num_slots = np.zeros(num_rows, dtype=np.int64)
        self.num_shared = np.zeros(num_rows, dtype=np.int64)
        self.slots = np.empty((num_rows, max_tokens_per_row), dtype=np.int64)
        self._states = np.full(num_rows, _NUMBERS[LeaseState.FREE])
        self._num_rows = [0] * len(_NUMBERS)  # rows in each state, counted incrementally: each step reads it
        self._num_rows[_NUMBERS[LeaseState.FREE]] = num_rows
        self._used_until: dict[Stream, NDArray[np.object_]] = {}

    def set_state(self, row: int, state: LeaseState) -> None:
        self._num_rows[self._states[row]] -= 1
        self._states[row] = _NUMBERS[state]
        self._num_rows[_NUMBERS[state]] += 1

    def rows_by_state(self) -> Sequence[int]:
        """Returns the number of rows in each state, in the order of LeaseState. The padding row counts as free."""
        return tuple(self._num_rows)

    def check_counts(self) -> None:
        """Counts the rows in each state anew. Raises AssertionError if that differs from the running counts."""
        num_rows: list[int] = np.bincount(self._states, minlength=len(_NUMBERS)).tolist()
        assert num_rows == self._num_rows, f"rows are counted wrongly: {self._num_rows} by state, {num_rows} there"

    def slots_by_state(self) -> Sequence[int]:
        """Returns for each state of rows, in the order of LeaseState, how many slots of their own its rows have."""
        num_own = self.num_slots - self.num_shared
        sums: list[float] = np.bincount(self._states, weights=num_own, minlength=len(_NUMBERS)).tolist()
        return [int(num_slots) for num_slots in sums]

    def use_until(self, rows: int | NDArray[np.int64], event: Event, stream: Stream) -> None:
        """Notes that work on `stream` uses `rows` until `event`, which replaces the rows' earlier event of `stream`."""
        if stream not in self._used_until:
            self._used_until[stream] = np.full(self.num_slots.shape, None)
        self._used_until[stream][rows] = event

    def is_in_use(self, row: int) -> bool:
        """Returns True if stream work that uses the row has not ended."""
        return not all(column[row] is None or column[row].is_done() for column in self._used_until.values())

    def clear(self, row: int) -> None:
        """Forgets the slots and the events of a row."""
        self.num_slots[row] = self.num_shared[row] = 0
        for column in self._used_until.values():
            column[row] = None
