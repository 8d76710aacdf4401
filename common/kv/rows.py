"""What the pool keeps for each of its rows: the token table on the device, which says which slot holds each token, and
the data on the host, as one array per property, so that a step reads a whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.stream import Event, Stream
from common.device.upload import upload_array

PADDING_ROW = 0


NewZeros = Callable[[Sequence[int], torch.dtype], Tensor]
"""A function that returns a new tensor of zeros."""


class ReqToTokenPool:
    """The rows of the pool and their token table.

    `req_to_token` [max_rows + 1, max_tokens_per_row] int64 holds the slot of each token. Row 0 is padding and is never
    given out. While stream work uses a row, entries are only appended, because a running forward may be reading the
    earlier ones. They are overwritten when no forward reads them: after the row has been freed and given out again, or
    when it gets the prefix cache's slots in place of its own.
    """

    def __init__(self, *, max_rows: int, max_tokens_per_row: int, new_zeros: NewZeros) -> None:
        self.req_to_token = new_zeros((max_rows + 1, max_tokens_per_row), torch.int64)
        self._places = self.req_to_token.view(-1)
        self.max_rows = max_rows
        self._free = list(range(max_rows, PADDING_ROW, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Takes a free row of the pool and returns its index, or None if there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, row: int) -> None:
        """Makes a row free again."""
        assert row != PADDING_ROW and row not in self._free, f"row {row} freed twice"
        self._free.append(row)

    def write(self, row: int, start: int, slots: NDArray[np.int64]) -> None:
        """Writes `slots` [N] into one row of the table, for the tokens from `start` on."""
        table = self.req_to_token
        table[row, start : start + len(slots)] = upload_array(slots, table.device)

    def write_each(self, rows: NDArray[np.int64], positions: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Writes slots[i] into row rows[i] of the table, at position positions[i]. Shapes: all [N]."""
        device, width = self.req_to_token.device, self.req_to_token.shape[1]
        assert positions.min(initial=0) >= 0 and positions.max(initial=0) < width, "written beside its row"
        places = upload_array(rows * width + positions, device)
        self._places.index_copy_(0, places, upload_array(slots, device))


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
        """Returns, for each state in the order of LeaseState, how many slots the rows in this state own."""
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
