"""The launch of a Triton kernel as a value: it can be run, or inspected to learn which variant would be compiled.

Triton compiles a kernel once for each combination of argument types, constants and options. By default it also
specialises on argument values: whether an address or an integer is a multiple of 16, and whether an integer is 1. These
differ between batches, and compiling a kernel while requests wait takes seconds. So Triton may specialise only on the
arguments that a kernel names as `fixed`: those that are the same in every launch of a loaded model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

_ALIGNMENT = 16


class Kernel:
    """A function in Triton's language, whose constants are annotated `tl.constexpr`.

    Triton specialises the compiled code only on the values of the `fixed` arguments. `varying` names all the others.
    """

    def __init__(self, function: Callable[..., None], *, fixed: Sequence[str]) -> None:
        self.name = function.__name__
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        arguments = [each.name for each in parameters if "constexpr" not in str(each.annotation)]
        assert {*fixed} <= {*arguments}, f"not all of {fixed} are arguments of {self.name}"
        self.varying = [name for name in arguments if name not in fixed]
        self.launcher: Any = triton.jit(function, do_not_specialize=self.varying)  # interpreted, if Triton says so


def kernel(*, fixed: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """Returns a decorator that makes a function a Kernel.

    `fixed` names the arguments that are the same in every launch of a loaded model.
    """
    return lambda function: Kernel(function, fixed=fixed)


def device_function(function: Callable[..., Any]) -> Any:
    """Returns `function`, compiled by Triton, as a function that kernels may call."""
    return triton.jit(function)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `kernel` over `grid`, with arguments and constants by parameter name.

    `fuses_operations` lets the compiler fuse a multiplication and an addition into one operation that rounds once.
    `overlaps` lets the launch start while the one before it ends.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | float]
    constants: Mapping[str, int | bool]
    num_warps: int = 4
    num_stages: int = 1
    fuses_operations: bool = True
    overlaps: bool = False

    def run(self) -> None:
        """Launches the kernel on the current stream. Does nothing if the grid is empty."""
        if 0 not in self.grid:
            self.kernel.launcher[self.grid](**self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int]:
        """The options with which Triton compiles and launches the kernel."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fuses_operations,
            **({"launch_pdl": True} if self.overlaps else {}),
        }


Launcher = Callable[[Launch], None]
"""A function that receives launches: `Launch.run`, or one that only collects them."""


def aligned(x: Tensor) -> Tensor:
    """Returns `x`, or a copy where it is not contiguous or not aligned to 16 bytes, as some kernels require."""
    return x if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)
