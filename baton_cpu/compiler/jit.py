"""Compiles kernels for CPUs, and gives them an exp that vectorises, which numba lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np

Kernel = Callable[..., Any]

_LEAST_EXPONENT = np.float32(-87)  # exp of a smaller number would be subnormal, or nearly
_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}


def jit(function: Kernel, *, is_kept: bool = False) -> Kernel:
    """Returns `function` as a kernel: compiled by numba at the first call of each signature (the types of its
    arguments). Kernels run without the interpreter's lock.

    With `is_kept` the compiled code is also written to numba's cache, where it is found by source file, CPU, signature
    and closure. The compiler may reorder sums. It may not assume that there is no NaN or infinity, because these show
    that a row's results are wrong.
    """
    return cast("Kernel", numba.njit(cache=is_kept, **_OPTIONS)(function))


@numba.njit(inline="always")
def _exp(number):
    bounded = _LEAST_EXPONENT if number < _LEAST_EXPONENT else number
    power = np.floor(bounded * _LOG2_E + np.float32(0.5))
    x = bounded - power * _LN_2
    series = np.float32(1 / 120) + x * np.float32(1 / 720)
    series = np.float32(1 / 24) + x * series
    series = np.float32(1 / 6) + x * series
    series = np.float32(0.5) + x * series
    series = np.float32(1) + x * (np.float32(1) + x * series)
    whole = np.int32(power if power == power else np.float32(0))  # a NaN turned into an integer could be anything
    scale = np.uint32((whole + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0) if number < _LEAST_EXPONENT else series * scale


exp = cast("Kernel", _exp)
"""`exp(number)`, for kernels: returns exp of a float32 that is at most 0. Loops over it become vector code.

The relative error is at most 2e-7 + 1e-7 |number|. The result is 0 for numbers below -87.
"""
