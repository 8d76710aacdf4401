"""What kernels for CPUs share: how they are compiled, and how they read and write numbers of a model's dtype.

numba knows no bfloat16 and, on CPUs, no float16: such tensors are handed over as their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

Kernel = Callable[..., Any]

_LEAST_EXPONENT = np.float32(-87)  # of a number that is not subnormal
_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)


_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}


def jit(function: Kernel) -> Kernel:
    """Compile at the first call of each signature; runs without the interpreter's lock.

    Sums may be taken in any order; NaN and infinity keep their meaning, or a broken row would look sound.
    """
    return cast("Kernel", numba.njit(**_OPTIONS)(function))


def jit_cached(function: Kernel) -> Kernel:
    """The same, kept on disk for the next process (numba's cache: by source file, CPU and signature)."""
    return cast("Kernel", numba.njit(cache=True, **_OPTIONS)(function))


class NumberFormat(NamedTuple):
    """`read` makes a float32 of an element of `numpy_dtype`; `write` goes the other way, rounding to nearest."""

    dtype: torch.dtype
    bits_dtype: torch.dtype
    numpy_dtype: DTypeLike
    read: Kernel
    write: Kernel

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """The memory of `tensor`, made contiguous, as the kernel reads it. Its dtype must be this format's."""
        assert tensor.dtype == self.dtype, f"a kernel for {self.dtype} was given {tensor.dtype}"
        array: NDArray[Any] = tensor.contiguous().view(self.bits_dtype).numpy()
        return array


def number_format(dtype: torch.dtype) -> NumberFormat:
    return _FORMATS[dtype]


@intrinsic
def _prefetch(_context, array, offset_bytes):  # type: ignore[no-untyped-def]
    def generate(target, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = target.make_array(signature.args[0])(target, builder, arguments[0]).data
        address = builder.gep(builder.bitcast(data, pointer), [arguments[1]])
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        for_reading, keep, data_cache = number(0), number(3), number(1)
        builder.call(function, [address, for_reading, keep, data_cache])
        return target.get_dummy_value()

    return numba.void(array, offset_bytes), generate


prefetch = cast("Kernel", _prefetch)
"""`prefetch(array, offset_bytes)`, in a kernel: ask for that cache line of the array. Never faults."""


@numba.njit(inline="always")
def _exp(number):  # type: ignore[no-untyped-def]
    bounded = _LEAST_EXPONENT if number < _LEAST_EXPONENT else number
    power = np.floor(bounded * _LOG2_E + np.float32(0.5))
    x = bounded - power * _LN_2
    series = np.float32(1 / 120) + x * np.float32(1 / 720)
    series = np.float32(1 / 24) + x * series
    series = np.float32(1 / 6) + x * series
    series = np.float32(0.5) + x * series
    series = np.float32(1) + x * (np.float32(1) + x * series)
    whole = np.int32(power if power == power else np.float32(0))  # of a NaN an integer would be anything
    scale = np.uint32((whole + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if number < _LEAST_EXPONENT else series * scale


exp = cast("Kernel", _exp)
"""`exp(number)`, in a kernel, of a float32 up to 0. Loops over it become vector code.

Relative error at most 2e-7 + 1e-7 |number|; 0 below -87.
"""


@numba.njit(inline="always")
def _same(number):  # type: ignore[no-untyped-def]
    return number


@numba.njit(inline="always")
def _read_bfloat16(bits):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(inline="always")
def _write_bfloat16(number):  # type: ignore[no-untyped-def]
    bits = np.float32(number).view(np.uint32)
    half_of_last = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(bits + half_of_last) >> np.uint32(16)
    return np.uint16(rounded if number == number else 0x7FC0)  # rounding would carry a NaN into the sign


@intrinsic
def _read_float16(_context, bits):  # type: ignore[no-untyped-def]
    def generate(_target, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return numba.float32(bits), generate


@intrinsic
def _write_float16(_context, number):  # type: ignore[no-untyped-def]
    def generate(_target, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return numba.uint16(number), generate


_FORMATS = {
    torch.float32: NumberFormat(torch.float32, torch.float32, np.float32, _same, _same),
    torch.bfloat16: NumberFormat(torch.bfloat16, torch.uint16, np.uint16, _read_bfloat16, _write_bfloat16),
    torch.float16: NumberFormat(torch.float16, torch.uint16, np.uint16, _read_float16, _write_float16),
}
