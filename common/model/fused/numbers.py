"""Numbers of a model's dtype in kernels that are written once for all: bfloat16 is handed over as uint16."""

from __future__ import annotations

from typing import Any, cast

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from common.model.cpu_kernel import Kernel, exp, jit
from common.model.fused.memory import pointer

DTYPES = (torch.bfloat16, torch.float32)

_array_at = cast("Kernel", numba.carray)  # type: ignore[attr-defined]
_HALF, _BITS, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


class Bfloat16(ir.Type):  # type: ignore[misc]
    """llvmlite has no name for it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16)

    def __hash__(self) -> int:
        return hash(Bfloat16)


def has_bfloat16() -> bool:
    """Whether the CPU multiplies pairs of bfloat16, and rounds to them."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))


def input_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the rows that meet weights of `dtype`: float32 where they would be made that for each product."""
    return dtype if has_bfloat16() else torch.float32


@intrinsic
def _read(_context, number):  # type: ignore[no-untyped-def]
    def generate(_target, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        if number == types.float32:
            return arguments[0]
        return _widened(builder, arguments[0])

    return types.float32(number), generate


@intrinsic
def _rounded(_context, number, like):  # type: ignore[no-untyped-def]
    def generate(_target, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return arguments[0] if like.dtype == types.float32 else _to_bfloat16(builder, arguments[0])

    return like.dtype(types.float32, like), generate


def _widened(builder: Any, half: Any) -> Any:
    """The float32 of a bfloat16's bits."""
    return builder.bitcast(builder.shl(builder.zext(half, _BITS), _BITS(16)), _FLOAT)


def _to_bfloat16(builder: Any, number: Any) -> Any:
    """To the nearest, of two as near the even one; a NaN stays one."""
    if has_bfloat16():
        return builder.bitcast(builder.fptrunc(number, Bfloat16()), _HALF)
    bits = builder.bitcast(number, _BITS)
    last = builder.and_(builder.lshr(bits, _BITS(16)), _BITS(1))
    nearest = builder.lshr(builder.add(builder.add(bits, _BITS(0x7FFF)), last), _BITS(16))
    is_number = builder.fcmp_ordered("ord", number, number)
    return builder.trunc(builder.select(is_number, nearest, _BITS(0x7FC0)), _HALF)


@intrinsic
def _kept(_context, number, target, like):  # type: ignore[no-untyped-def]
    def generate(_target, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        if like.dtype == types.float32:
            return arguments[0]
        half = _to_bfloat16(builder, arguments[0])
        return half if target.dtype == like.dtype else _widened(builder, half)

    return target.dtype(types.float32, target, like), generate


@intrinsic
def _copied(_context, element, target):  # type: ignore[no-untyped-def]
    def generate(_target, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return arguments[0] if element == target.dtype else _widened(builder, arguments[0])

    return target.dtype(element, target), generate


def _input_like(like: Any) -> Any:
    raise NotImplementedError("in kernels only")


@overload(_input_like)
def _inputs_like(like):  # type: ignore[no-untyped-def]
    dtype = like.dtype if has_bfloat16() else types.float32
    return lambda like: _array_at(pointer(0), (0,), dtype)


read = cast("Kernel", _read)
"""`read(element)` is its float32."""
rounded = cast("Kernel", _rounded)
"""`rounded(number, like)` is the element that an array like `like` keeps of a float32."""


kept = cast("Kernel", _kept)
"""`kept(number, target, like)` is the element of array `target` for a float32 that is rounded to `like`'s dtype."""
copied = cast("Kernel", _copied)
"""`copied(element, target)` is the element of array `target` that holds the same number, of the same bits or wider."""
input_like = cast("Kernel", _input_like)
"""`input_like(like)`: an array without elements, of `input_dtype`."""


@jit
def silu(number):  # type: ignore[no-untyped-def]
    power = exp(-abs(number))
    share = np.float32(1) / (np.float32(1) + power)
    return number * (share if number >= 0 else power * share)
