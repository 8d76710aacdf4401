"""Rotary position embedding for CPUs, one kernel for all heads."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from baton_cpu.compiler.jit import Kernel
from baton_cpu.compiler.kernel_cache import compiled
from baton_cpu.compiler.numbers import number_format, read, rounded_as_torch


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Returns `x` [T, heads, head_dim] with rotary position embedding applied.

    `rotation` holds cosines and sines, each [1, T, head_dim]. Each number of a head's first half is rotated together
    with its counterpart in the second half.
    """
    cosines, sines = rotation
    assert cosines.shape == sines.shape == (1, x.shape[0], x.shape[2]), "the rotation is of whole heads"
    output = torch.empty(x.shape, dtype=x.dtype)
    array = number_format(x.dtype).array
    _compiled(x.dtype)(array(x), array(cosines[0]), array(sines[0]), array(output))
    return output


@cache
def _compiled(dtype: torch.dtype) -> Kernel:
    numpy_dtype = number_format(dtype).numpy_dtype
    head, angle = np.zeros((1, 1, 2), numpy_dtype), np.zeros((1, 2), numpy_dtype)
    return compiled(_rotate, (head, angle, angle, head.copy()), name=f"rotation-{dtype}")


def _rotate(x, cosines, sines, output):
    half = x.shape[2] // 2
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(half):
                first, second = read(x[t, h, d]), read(x[t, h, half + d])
                output[t, h, d] = rounded_as_torch(first * read(cosines[t, d]) - second * read(sines[t, d]), output)
                output[t, h, half + d] = rounded_as_torch(
                    second * read(cosines[t, half + d]) + first * read(sines[t, half + d]), output
                )
