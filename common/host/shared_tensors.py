"""Tensors in memory that other processes can map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.host.memory import require_room


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a contiguous tensor lies: the number of a file of SharedTensors, and the first byte in it."""

    file: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedTensors:
    """Files without a name, each with tensors, and a way to find the file of a tensor. Tensors live as long as this
    object, or longer if something else refers to them.

    The operating system frees a file with the last process that has it open or mapped.
    """

    def __init__(self) -> None:
        self.files: list[int] = []
        """The descriptors of the files."""
        self._memories: list[Tensor] = []  # of each file; kept, so that no other tensor gets its addresses

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns zeros in a new file. Their pages are provided when each is first used. Raises OSError."""
        num_bytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
        require_room(num_bytes)
        file = os.memfd_create("baton-shared", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        memory = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        self.note(memory, file)
        return memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def note(self, memory: Tensor, file: int) -> None:
        """Notes that `memory` [N] uint8 is the beginning of the open `file`, which this object closes."""
        self._memories.append(memory)
        self.files.append(file)

    def place_of(self, tensor: Tensor) -> TensorPlace:
        """Returns where a contiguous tensor lies. Raises ValueError if it is in none of the files."""
        assert tensor.is_contiguous()
        if not tensor.numel():
            return TensorPlace(0, 0, tuple(tensor.shape), tensor.dtype)
        first = tensor.data_ptr()
        for file, memory in enumerate(self._memories):
            start = memory.data_ptr()
            if start <= first and first + tensor.nbytes <= start + memory.numel():
                return TensorPlace(file, first - start, tuple(tensor.shape), tensor.dtype)
        raise ValueError("the tensor is not in shared memory")

    def let_go(self, num_kept: int) -> None:
        """Closes all files but the first `num_kept`. Tensors in them stay as long as something refers to them."""
        del self._memories[num_kept:]
        while len(self.files) > num_kept:
            os.close(self.files.pop())

    def close(self) -> None:
        """Closes the files. Tensors in them stay as long as something refers to them."""
        self.let_go(0)


def mapped(file: int) -> Tensor:
    """Maps an open file of another process, and returns its bytes, [N] uint8."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


def at(memory: Tensor, place: TensorPlace) -> Tensor:
    """Returns the tensor at `place` in the mapped `memory` of its file."""
    num_bytes = torch.Size(place.shape).numel() * place.dtype.itemsize
    return memory[place.start : place.start + num_bytes].view(place.dtype).view(place.shape)
