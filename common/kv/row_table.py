"""The token table of the request rows. It says which slot of the KV pool holds each token of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.upload import upload_array

PADDING_ROW = 0


NewZeros = Callable[[Sequence[int], torch.dtype], Tensor]
"""A function that returns a new tensor of zeros."""


class ReqToTokenPool:
    """The rows of the pool and their token table.

    `req_to_token` [max_rows + 1, max_tokens_per_row] int64 holds the slot of each token. Row 0 is padding and is never
    given out. While stream work uses a row, entries are only appended, because a running forward may be reading the
    earlier ones. They are overwritten when no forward reads them: after the row has been freed and given out again, or
    when it gets the prefix cache's slots for its own.
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
