"""What a product reads, in kernels that are written once for all dtypes: rounded to the model's, kept wider where the
CPU multiplies no bfloat16.
"""

from __future__ import annotations

from typing import Any, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from baton_cpu.compiler.jit import Kernel, exp, jit
from baton_cpu.compiler.memory import pointer
from baton_cpu.compiler.numbers import Bfloat16, has_bfloat16, narrowed, widened

DTYPES = (torch.bfloat16, torch.float32)

_array_at = cast("Kernel", numba.carray)  # type: ignore[attr-defined]


def input_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the rows that meet weights of `dtype`: float32 where they would be made that for each product."""
    return dtype if has_bfloat16() else torch.float32


@intrinsic
def _rounded(_context, number, like):
    def generate(_target, builder, _signature, arguments):
        return _narrowed(builder, like.dtype, arguments[0])

    return like.dtype(types.float32, like), generate


@intrinsic
def _kept(_context, number, target, like):
    def generate(_target, builder, _signature, arguments):
        element = _narrowed(builder, like.dtype, arguments[0])
        return element if target.dtype == like.dtype else widened(builder, like.dtype, element)

    return target.dtype(types.float32, target, like), generate


@intrinsic
def _copied(_context, element, target):
    def generate(_target, builder, _signature, arguments):
        return arguments[0] if element == target.dtype else widened(builder, element, arguments[0])

    return target.dtype(element, target), generate


def _narrowed(builder: Any, kind: types.Type, number: Any) -> Any:
    """By the CPU's own instruction where it has one, which makes 0 of what is smaller than any normal number."""
    if kind == types.uint16 and has_bfloat16():
        return builder.bitcast(builder.fptrunc(number, Bfloat16()), ir.IntType(16))
    return narrowed(builder, kind, number)


def _input_like(like: Any) -> Any:
    raise NotImplementedError("in kernels only")


@overload(_input_like)
def _inputs_like(like):
    dtype = like.dtype if has_bfloat16() else types.float32
    return lambda like: _array_at(pointer(0), (0,), dtype)


rounded = cast("Kernel", _rounded)
"""`rounded(number, like)` is the element that an array like `like` keeps of a float32: the nearest."""
kept = cast("Kernel", _kept)
"""`kept(number, target, like)` is the element of array `target` for a float32 that is rounded to `like`'s dtype."""
copied = cast("Kernel", _copied)
"""`copied(element, target)` is the element of array `target` that holds the same number, of the same bits or wider."""
input_like = cast("Kernel", _input_like)
"""`input_like(like)`: an array without elements, of `input_dtype`."""


@jit
def silu(number):
    power = exp(-abs(number))
    share = np.float32(1) / (np.float32(1) + power)
    return number * (share if number >= 0 else power * share)
