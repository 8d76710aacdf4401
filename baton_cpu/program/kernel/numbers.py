"""Rounds and stores numbers in kernels that are written once for all dtypes.

Results are rounded to the model's dtype. Where the CPU does not multiply bfloat16, the inputs of matrix products are
stored as float32 after that rounding.
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
    """Returns the dtype of rows that are multiplied by weights of `dtype`. It is `dtype`, but float32 where the CPU
    does not multiply bfloat16, because each product would otherwise convert the rows again.
    """
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
    """Generates code that rounds the float32 `number`, an LLVM value, to an element of numba's type `kind` (uint16 for
    bfloat16). For bfloat16 it uses the CPU's own instruction if there is one, which turns subnormal numbers into 0.
    `builder` is llvmlite's IRBuilder, which the code is added to.
    """
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
"""`rounded(number, like)`, for kernels: rounds a float32 to the nearest element of `like`'s dtype. It is faster than
`rounded_as_torch` where the CPU has an instruction for bfloat16, which turns subnormal numbers into 0.
"""
kept = cast("Kernel", _kept)
"""`kept(number, target, like)`, for kernels: rounds a float32 to `like`'s dtype, and returns it as an element of array
`target`.
"""
copied = cast("Kernel", _copied)
"""`copied(element, target)`, for kernels: converts the element to the dtype of array `target`, which is the same or
wider.
"""
input_like = cast("Kernel", _input_like)
"""`input_like(like)`, for kernels: returns an empty array of the dtype that products read; see `input_dtype`."""


@jit
def silu(number):
    power = exp(-abs(number))
    share = np.float32(1) / (np.float32(1) + power)
    return number * (share if number >= 0 else power * share)
