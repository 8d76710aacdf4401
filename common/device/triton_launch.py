"""A Triton kernel's launch as a value: it can be run on a device, or asked what would be compiled for it.

Triton compiles a kernel once for each combination of argument types, constants and options, and by default also for
what it finds in the arguments: whether an address or an integer is a multiple of 16, and whether an integer is 1. Such
a thing differs between two batches, and a kernel that is compiled while requests wait costs seconds. So only arguments
that a kernel names as `fixed` are looked at: those that are the same in every launch of a loaded model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor


class Kernel:
    """A function in Triton's language, with constants annotated `tl.constexpr`. `varying` are all arguments but the
    fixed ones.
    """

    def __init__(self, function: Callable[..., None], *, fixed: Sequence[str]) -> None:
        self.name = function.__name__
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        arguments = [each.name for each in parameters if "constexpr" not in str(each.annotation)]
        assert {*fixed} <= {*arguments}, f"not all of {fixed} are arguments of {self.name}"
        self.varying = [name for name in arguments if name not in fixed]
        self.launcher: Any = triton.jit(function, do_not_specialize=self.varying)  # the interpreter's, where that is on


def kernel(*, fixed: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """Makes a function a Kernel. `fixed` names the arguments that are the same in every launch of a loaded model."""
    return lambda function: Kernel(function, fixed=fixed)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `kernel` over `grid`, by the names of its parameters. `fuses_operations`: whether a product may be
    added to without being rounded before. `overlaps`: whether it may start while the one before it ends.
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
        """On the current stream. A grid without programs launches nothing."""
        if 0 not in self.grid:
            self.kernel.launcher[self.grid](**self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fuses_operations,
            **({"launch_pdl": True} if self.overlaps else {}),
        }


Launcher = Callable[[Launch], None]
"""What becomes of launches: `Launch.run`, or what only takes note of them."""
