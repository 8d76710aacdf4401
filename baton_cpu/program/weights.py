"""Weights in the panels that `dot_products` reads, in large pages where the system has them.

A step reads them from one end to the other: with pages of 4 KiB it looks up tens of thousands of them, in a virtual
machine twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from common.host.untouched_memory import untouched_zeros

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
_PART_BYTES = 64 << 20  # packed between two checks


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


def step_of(dtype: torch.dtype) -> int:
    """Numbers of a row in a step. `dtype` is bfloat16 or float32."""
    return {torch.bfloat16: 2, torch.float32: 1}[dtype]


def packed(weight: Tensor, memory: WeightMemory, check: Callable[[], None]) -> Tensor:
    """`weight` [outputs, inputs], whose inputs are whole steps, in panels. Missing outputs of the last are 0.

    `check` is called before each 64 MiB, and may raise.
    """
    num_outputs, num_inputs = weight.shape
    step = step_of(weight.dtype)
    assert num_inputs % step == 0
    num_panels = -(-num_outputs // PANEL_WIDTH)
    storage = memory.zeros(num_panels * PANEL_WIDTH * num_inputs, weight.dtype)
    whole = num_outputs // PANEL_WIDTH
    steps = weight.contiguous().view(torch.int32)  # steps are moved as one number: several times faster than as two
    panels = storage.view(torch.int32).view(num_panels, num_inputs // step, PANEL_WIDTH)
    in_part = max(1, _PART_BYTES // (PANEL_WIDTH * num_inputs * weight.itemsize))
    for first in range(0, whole, in_part):
        check()
        last = min(first + in_part, whole)
        part = steps[first * PANEL_WIDTH : last * PANEL_WIDTH]
        panels[first:last] = part.unflatten(0, (last - first, PANEL_WIDTH)).transpose(1, 2)
    if rest := num_outputs - whole * PANEL_WIDTH:
        panels[whole, :, :rest] = steps[-rest:].t()
    return storage.view(*panels.shape, step)
