"""Memory for weights that are read from one end to the other at every step: in large pages where the system has them.

With pages of 4 KiB a pass over the weights looks up tens of thousands of them, in a virtual machine twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.host.untouched_memory import untouched_zeros

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class WeightMemory:
    """Hands out tensors, which keep their memory for as long as they live."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A [num_elements] tensor of zeros at a multiple of 64 bytes."""
        num_bytes = num_elements * dtype.itemsize
        if self._used_bytes + num_bytes + _ALIGNMENT > self._chunk.shape[0]:
            chunk_bytes = max(num_bytes + _ALIGNMENT, _CHUNK_BYTES)
            self._chunk, self._used_bytes = untouched_zeros(chunk_bytes, in_large_pages=True), 0
        start = self._used_bytes + -(self._chunk.data_ptr() + self._used_bytes) % _ALIGNMENT
        self._used_bytes = start + num_bytes
        return self._chunk[start : start + num_bytes].view(dtype)
