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
from functools import cached_property
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

_ANY_TARGET = GPUTarget("cuda", 90, 32)  # what Triton looks at in arguments is the same for all of CUDA's


class Kernel:
    """A function in Triton's language. Its constants are annotated `tl.constexpr`."""

    def __init__(self, function: Callable[..., None], *, fixed: Sequence[str]) -> None:
        self.name = function.__name__
        parameters = inspect.signature(function).parameters.values()
        arguments = [each.name for each in parameters if "constexpr" not in str(each.annotation)]
        assert {*fixed} <= {*arguments}, f"{self.name} has no { ({*fixed} - {*arguments}) }"
        varying = [name for name in arguments if name not in fixed]
        self.launcher: Any = triton.jit(function, do_not_specialize=varying)  # the interpreter's, where that is on
        self._function, self._varying = function, varying

    @cached_property
    def definition(self) -> JITFunction[Any]:
        """What is compiled, also where the interpreter is on."""
        if isinstance(self.launcher, JITFunction):
            return self.launcher
        return JITFunction(self._function, do_not_specialize=self._varying)

    @cached_property
    def bind(self) -> Callable[..., Any]:
        """Triton's own reading of a launch's arguments."""
        return create_function_from_signature(  # type: ignore[no-any-return]
            self.definition.signature, self.definition.params, make_backend(_ANY_TARGET)
        )


def kernel(*, fixed: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """Makes a function a Kernel. `fixed`: its arguments that are the same in every launch of a loaded model."""
    return lambda function: Kernel(function, fixed=fixed)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compiled for a launch: the kernel with what Triton's cache tells apart, in the order of its parameters.

    A constant's type is `constexpr`, and its property is its value. An argument's property is `D` where it is known to
    be a multiple of 16, 1 where it is known to be 1, and None where nothing is looked at.
    """

    kernel: Kernel
    types: tuple[str, ...]
    properties: tuple[object, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def constants(self) -> dict[str, Any]:
        names = [parameter.name for parameter in self.kernel.definition.params]
        columns = zip(names, self.types, self.properties, strict=True)
        return {name: value for name, kind, value in columns if kind == "constexpr"}

    def compile(self, capability: int) -> CompiledKernel:
        """For devices of this compute capability, 80 for 8.0; needs none."""
        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        definition = self.kernel.definition
        bound = {parameter.name: self.constants.get(parameter.name) for parameter in definition.params}
        given = dict(self.options)
        specialization = list(zip(self.types, self.properties, strict=True))
        options, signature, constants, attributes = definition._pack_args(backend, given, bound, specialization, None)
        source = ASTSource(definition, signature, constants, attributes)
        return triton.compile(source, target=target, options=options.__dict__)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `kernel` over `grid`, by the names of its parameters. `fuses_operations`: whether a product may be
    added to without being rounded before.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | float]
    constants: Mapping[str, int | bool]
    num_warps: int = 4
    num_stages: int = 1
    fuses_operations: bool = True

    def run(self) -> None:
        """On the current stream. A grid without programs launches nothing."""
        if 0 not in self.grid:
            self.kernel.launcher[self.grid](**self.arguments, **self.constants, **self._options())

    def variant(self) -> Variant:
        _, looked_at, _ = self.kernel.bind(**self.arguments, **self.constants)
        types, properties = zip(*looked_at, strict=True)
        return Variant(self.kernel, types, properties, tuple(self._options().items()))

    def _options(self) -> dict[str, int]:
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fuses_operations,
        }


Launcher = Callable[[Launch], None]
"""What becomes of launches: `Launch.run`, or what only takes note of them."""
