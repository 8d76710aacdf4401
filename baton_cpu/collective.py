"""Sums and joins tensors of several processes of one host through memory that they share, without the interpreter.

Each process is a rank with two spaces, used in turns. It copies its numbers into one, counts the copy, waits until all
ranks have counted theirs, and reads those. Before it writes to a space again, all ranks have read it. The memory:

    | -1 if given up | rank 0: number of copies | rank 1: ... | rank 0: space 0, space 1 | rank 1: ... |

Numbers are summed in the order of the ranks, in float32, so all ranks have the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import cast

import numba
import numpy as np
import torch
from torch import Tensor

from baton_cpu.compiler.jit import Kernel, jit
from baton_cpu.compiler.kernel_cache import compiled
from baton_cpu.compiler.memory import load_word, pause, pointer, store_word, yield_core
from baton_cpu.compiler.numbers import number_format, read, rounded_as_torch
from common.model.part import MemberLost

_array_at = cast("Kernel", numba.carray)  # type: ignore[attr-defined]
_LINE_BYTES = 64
_SPACE_BYTES = 1 << 20
_SPINS_BEFORE_YIELD = 2_000
_GIVEN_UP = -1


def collective_bytes(num_ranks: int) -> int:
    """Returns the size of the shared memory of `num_ranks` ranks. The memory must be zeros at first."""
    return (1 + num_ranks) * _LINE_BYTES + 2 * num_ranks * _SPACE_BYTES


class SharedCollective:
    """A Collective over `memory` [collective_bytes(num_ranks)] uint8, which starts at a multiple of 64 bytes.

    All ranks must call the same methods, with tensors of the same shapes, in the same order.
    """

    def __init__(self, memory: Tensor, *, rank: int, num_ranks: int) -> None:
        assert memory.numel() == collective_bytes(num_ranks) and memory.data_ptr() % _LINE_BYTES == 0
        self._memory = memory
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_copies = 0

    def sum_up(self, values: Tensor) -> None:
        format_ = number_format(values.dtype)
        assert values.is_contiguous()
        self._call(_sum_kernel(values.dtype), values.view(-1).view(format_.bits_dtype).numpy())

    def joined(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        rows = part.contiguous().flatten(0, -2)
        assert rows.shape[1] == widths[self._rank]
        output = torch.empty((rows.shape[0], sum(widths)), dtype=part.dtype)
        stops = np.cumsum(widths) * part.itemsize
        starts = stops - np.array(widths) * part.itemsize
        self._call(_join_kernel(), rows.view(torch.uint8).numpy(), output.view(torch.uint8).numpy(), starts, stops)
        return output.view(*part.shape[:-1], sum(widths))

    def give_up(self) -> None:
        self._memory[:8].view(torch.int64)[0] = _GIVEN_UP

    def counts(self) -> list[int]:
        words = self._memory[: (1 + self._num_ranks) * _LINE_BYTES].view(torch.int64)
        counts: list[int] = words[_LINE_BYTES // 8 :: _LINE_BYTES // 8].tolist()
        return counts

    def _call(self, kernel: Kernel, *arguments: object) -> None:
        base = self._memory.data_ptr()
        num_copies = kernel(*arguments, base, self._rank, self._num_ranks, self._num_copies)
        if num_copies == _GIVEN_UP:
            raise MemberLost("another rank is lost")
        self._num_copies = num_copies


@jit
def _space(base, rank, num_ranks, num_copies):
    """Returns the address of the space that a rank uses for copy number `num_copies`."""
    return base + (1 + num_ranks) * _LINE_BYTES + (2 * rank + num_copies % 2) * _SPACE_BYTES


@jit
def _meet(base, rank, num_ranks, num_copies):
    """Says that this rank has made `num_copies` copies, and waits until all have. Returns False if the ranks are given
    up.
    """
    store_word(base + (1 + rank) * _LINE_BYTES, num_copies)
    if load_word(base) == _GIVEN_UP:
        return False
    for other in range(num_ranks):
        num_spins = 0
        while load_word(base + (1 + other) * _LINE_BYTES) < num_copies:
            if load_word(base) == _GIVEN_UP:
                return False
            num_spins += 1
            if num_spins > _SPINS_BEFORE_YIELD:
                yield_core()
            else:
                pause()
    return True


@cache
def _sum_kernel(dtype: torch.dtype) -> Kernel:
    numpy_dtype = np.dtype(number_format(dtype).numpy_dtype)
    most = _SPACE_BYTES // numpy_dtype.itemsize

    def sum_up(values, base, rank, num_ranks, num_copies):
        """Replaces `values` [N] by all ranks' sum. Returns the number of copies made so far, or -1 if given up."""
        for start in range(0, values.shape[0], most):
            stop = min(start + most, values.shape[0])
            space = _space(base, rank, num_ranks, num_copies)
            own = _array_at(pointer(space), stop - start, numpy_dtype)
            for i in range(stop - start):
                own[i] = values[start + i]
            if not _meet(base, rank, num_ranks, num_copies + 1):
                return np.int64(_GIVEN_UP)
            first = _array_at(pointer(_space(base, 0, num_ranks, num_copies)), stop - start, numpy_dtype)
            if num_ranks == 2:
                second = _array_at(pointer(_space(base, 1, num_ranks, num_copies)), stop - start, numpy_dtype)
                for i in range(stop - start):
                    values[start + i] = rounded_as_torch(read(first[i]) + read(second[i]), values)
            else:
                total = np.empty(stop - start, np.float32)
                for i in range(stop - start):
                    total[i] = read(first[i])
                for other in range(1, num_ranks):
                    theirs = _array_at(pointer(_space(base, other, num_ranks, num_copies)), stop - start, numpy_dtype)
                    for i in range(stop - start):
                        total[i] += read(theirs[i])
                for i in range(stop - start):
                    values[start + i] = rounded_as_torch(total[i], values)
            num_copies += 1
        return np.int64(num_copies)

    return compiled(sum_up, _alone(np.zeros(1, numpy_dtype)), name=f"sum-up-{dtype}")


@cache
def _join_kernel() -> Kernel:
    def join(part, output, starts, stops, base, rank, num_ranks, num_copies):
        """Writes each rank's `part` [rows, bytes] to columns starts[rank] .. stops[rank] - 1 of `output`. Returns the
        number of copies made so far, or -1 if given up.
        """
        widest = np.int64(1)
        for other in range(num_ranks):
            widest = max(widest, stops[other] - starts[other])
        num_pieces = (widest + _SPACE_BYTES - 1) // _SPACE_BYTES  # of a row that is wider than the space
        most = max(np.int64(1), _SPACE_BYTES // widest)
        for first in range(0, part.shape[0], most):
            num_rows = min(most, part.shape[0] - first)
            for piece in range(num_pieces):
                begin = piece * _SPACE_BYTES
                width = min(part.shape[1] - begin, _SPACE_BYTES)
                if width > 0:
                    own = _array_at(pointer(_space(base, rank, num_ranks, num_copies)), (num_rows, width), np.uint8)
                    for row in range(num_rows):
                        for i in range(width):
                            own[row, i] = part[first + row, begin + i]
                if not _meet(base, rank, num_ranks, num_copies + 1):
                    return np.int64(_GIVEN_UP)
                for other in range(num_ranks):
                    start = starts[other] + begin
                    width = min(stops[other] - start, _SPACE_BYTES)
                    if width > 0:
                        space = _space(base, other, num_ranks, num_copies)
                        theirs = _array_at(pointer(space), (num_rows, width), np.uint8)
                        for row in range(num_rows):
                            for i in range(width):
                                output[first + row, start + i] = theirs[row, i]
                num_copies += 1
        return np.int64(num_copies)

    one, place = np.zeros((1, 1), np.uint8), np.zeros(1, np.int64)
    return compiled(join, _alone(one, one.copy(), place, place + 1), name="join")


def _alone(*arguments: object) -> tuple[object, ...]:
    """Returns `arguments` and those of a rank that is alone, to compile a kernel with."""
    memory = _alone_memory()
    return (*arguments, memory.data_ptr() + -memory.data_ptr() % _LINE_BYTES, 0, 1, 0)


@cache
def _alone_memory() -> Tensor:
    return torch.zeros(collective_bytes(1) + _LINE_BYTES, dtype=torch.uint8)
