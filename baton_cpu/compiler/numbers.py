"""Reads and rounds numbers of a model's dtype in kernels for CPUs.

On CPUs numba knows neither bfloat16 nor float16 nor FP8. Kernels therefore get the bits of such tensors: uint16 for
bfloat16, int16 for float16, uint8 for FP8 (e4m3), which PyTorch has as uint8 too.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, cast

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from baton_cpu.compiler.jit import Kernel

_HALF, _BITS, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


class NumberFormat(NamedTuple):
    """The form in which kernels get tensors of `dtype`: as arrays of `numpy_dtype` with the same bits. `bits_dtype` is
    PyTorch's name for `numpy_dtype`.
    """

    dtype: torch.dtype
    bits_dtype: torch.dtype
    numpy_dtype: DTypeLike

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """Returns the memory of `tensor` as an array for kernels, copied if it is not contiguous. `tensor` must have
        this format's dtype.
        """
        assert tensor.dtype == self.dtype, f"a kernel for {self.dtype} was given {tensor.dtype}"
        array: NDArray[Any] = tensor.contiguous().view(self.bits_dtype).numpy()
        return array


def number_format(dtype: torch.dtype) -> NumberFormat:
    """Returns the form in which kernels get tensors of `dtype`: float32, bfloat16, float16, or uint8 (bits of FP8)."""
    return _FORMATS[dtype]


_FORMATS = {
    torch.float32: NumberFormat(torch.float32, torch.float32, np.float32),
    torch.bfloat16: NumberFormat(torch.bfloat16, torch.uint16, np.uint16),
    torch.float16: NumberFormat(torch.float16, torch.int16, np.int16),
    torch.uint8: NumberFormat(torch.uint8, torch.uint8, np.uint8),
}


class Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type bfloat, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16)

    def __hash__(self) -> int:
        return hash(Bfloat16)


@cache
def has_bfloat16() -> bool:
    """Returns whether the CPU has instructions that multiply pairs of bfloat16 numbers and that round to bfloat16."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))


@intrinsic
def _read(_context, number):
    def generate(_target, builder, _signature, arguments):
        return widened(builder, number, arguments[0])

    return types.float32(number), generate


@intrinsic
def _rounded_as_torch(_context, number, like):
    def generate(_target, builder, _signature, arguments):
        return narrowed(builder, like.dtype, arguments[0])

    return like.dtype(types.float32, like), generate


read = cast("Kernel", _read)
"""`read(element)`, for kernels: returns the element as a float32."""
rounded_as_torch = cast("Kernel", _rounded_as_torch)
"""`rounded_as_torch(number, like)`, for kernels: rounds a float32 to an element of `like`'s dtype. It rounds to the
nearest, ties to even, as PyTorch does. A NaN stays a NaN.
"""


def widened(builder: Any, kind: types.Type, element: Any) -> Any:
    """Generates code that turns an element of numba's type `kind` (float32, uint16 for bfloat16, int16 for float16 or
    uint8 for FP8) into a float32. `element` and the result are LLVM values. `builder` is llvmlite's IRBuilder, which
    the code is added to.
    """
    if kind == types.float32:
        return element
    if kind == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(element, _BITS), _BITS(16)), _FLOAT)
    if kind == types.uint8:
        return _widened_fp8(builder, builder.zext(element, _BITS))
    assert kind == types.int16, kind
    return builder.fpext(builder.bitcast(element, ir.HalfType()), _FLOAT)


def _widened_fp8(builder: Any, bits: Any) -> Any:
    """Generates code that turns FP8 `bits` into a float32, whose exponent bias is 120 larger. A NaN stays a NaN."""
    size = builder.and_(bits, _BITS(0x7F))
    moved = builder.fmul(builder.bitcast(builder.shl(size, _BITS(20)), _FLOAT), _FLOAT(2.0**120))
    sign = builder.shl(builder.and_(bits, _BITS(0x80)), _BITS(24))
    signed = builder.or_(builder.bitcast(moved, _BITS), sign)
    is_nan = builder.icmp_unsigned("==", size, _BITS(0x7F))
    return builder.bitcast(builder.select(is_nan, _BITS(0x7FC00000), signed), _FLOAT)


def narrowed(builder: Any, kind: types.Type, number: Any) -> Any:
    """Generates code that rounds a float32 to the nearest element of numba's type `kind` (float32, uint16 for bfloat16
    or int16 for float16). `number` and the result are LLVM values. `builder` is llvmlite's IRBuilder, which the code is
    added to.
    """
    if kind == types.float32:
        return number
    if kind == types.uint16:
        return _nearest_bfloat16(builder, number)
    assert kind == types.int16, kind
    return builder.bitcast(builder.fptrunc(number, ir.HalfType()), _HALF)


def _nearest_bfloat16(builder: Any, number: Any) -> Any:
    bits = builder.bitcast(number, _BITS)
    last = builder.and_(builder.lshr(bits, _BITS(16)), _BITS(1))
    nearest = builder.lshr(builder.add(builder.add(bits, _BITS(0x7FFF)), last), _BITS(16))
    is_number = builder.fcmp_ordered("ord", number, number)
    return builder.trunc(builder.select(is_number, nearest, _BITS(0x7FC0)), _HALF)
