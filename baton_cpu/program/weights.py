"""Packs weights into the panels that `dot_products` reads, in large memory pages if the system has them.

A decode step reads all weights from one end to the other. With pages of 4 KiB the CPU looks up tens of thousands of
pages, and looks up each twice in a virtual machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from common.host.untouched_memory import untouched_zeros

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
PART_BYTES = 64 << 20  # of weights, packed between two calls of `check`


class WeightMemory:
    """Allocates memory for weights. It is cut from large chunks, and a chunk lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def zeros(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor [num_elements] of zeros, whose address is a multiple of 64."""
        num_bytes = num_elements * dtype.itemsize
        if self._used_bytes + num_bytes + _ALIGNMENT > self._chunk.shape[0]:
            chunk_bytes = max(num_bytes + _ALIGNMENT, _CHUNK_BYTES)
            self._chunk, self._used_bytes = untouched_zeros(chunk_bytes, in_large_pages=True), 0
        start = self._used_bytes + -(self._chunk.data_ptr() + self._used_bytes) % _ALIGNMENT
        self._used_bytes = start + num_bytes
        return self._chunk[start : start + num_bytes].view(dtype)


def step_of(dtype: torch.dtype) -> int:
    """Returns how many numbers of a weight's row make a step, the unit of 4 bytes in panels. `dtype` is bfloat16 or
    float32.
    """
    return {torch.bfloat16: 2, torch.float32: 1}[dtype]


def packed(weight: Tensor, memory: WeightMemory, check: Callable[[], None]) -> Tensor:
    """Returns `weight` [outputs, inputs], of bfloat16 or float32, packed into panels: [panels, steps, PANEL_WIDTH,
    numbers of a step]. A step is 4 bytes of a row, and a row's inputs must be a whole number of steps. Outputs that the
    last panel lacks are 0. The result lies in `memory`.

    `check` is called before each 64 MiB are packed. It may raise an exception to stop the packing.
    """
    return packed_one_by_one([weight], 1, memory, check)[0]


def packed_one_by_one(
    weights: Iterable[Tensor], num_weights: int, memory: WeightMemory, check: Callable[[], None]
) -> Tensor:
    """Returns `num_weights` weights of the same shape packed as by `packed`, one after the other: [weights, panels,
    steps, PANEL_WIDTH, numbers of a step]. The next of `weights` is taken only when the previous one is packed.
    """
    packed_weights = torch.empty(0)
    for place, weight in enumerate(weights):
        if place == 0:
            num_outputs, num_inputs = weight.shape
            step = step_of(weight.dtype)
            assert num_inputs % step == 0
            shape = (num_weights, -(-num_outputs // PANEL_WIDTH), num_inputs // step, PANEL_WIDTH, step)
            packed_weights = memory.zeros(math.prod(shape), weight.dtype).view(shape)
        _pack(weight, packed_weights[place], check)
    return packed_weights


def _pack(weight: Tensor, target: Tensor, check: Callable[[], None]) -> None:
    """Packs `weight` [outputs, inputs] into the panels of `target`. `check` is called between parts, and may raise."""
    num_outputs, num_inputs = weight.shape
    whole = num_outputs // PANEL_WIDTH
    steps = weight.contiguous().view(torch.int32)  # a step is moved as one number, several times faster than as two
    panels = target.flatten(2).view(torch.int32).view(*target.shape[:3])
    in_part = max(1, PART_BYTES // (PANEL_WIDTH * num_inputs * weight.itemsize))
    for first in range(0, whole, in_part):
        check()
        last = min(first + in_part, whole)
        part = steps[first * PANEL_WIDTH : last * PANEL_WIDTH]
        panels[first:last] = part.unflatten(0, (last - first, PANEL_WIDTH)).transpose(1, 2)
    if rest := num_outputs - whole * PANEL_WIDTH:
        panels[whole, :, :rest] = steps[-rest:].t()
