"""Finds out how Triton would compile a kernel launch, and compiles it, without a GPU.

It uses internals of Triton to classify the launch's arguments; these may change with any version. No service imports
this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from common.device.triton_launch import Kernel, Launch

_ANY_TARGET = GPUTarget("cuda", 90, 32)  # the classification of arguments is the same for all CUDA devices


@cache
def _definition(kernel: Kernel) -> JITFunction[Any]:
    """Returns the kernel's function for compilation, even if Triton's interpreter is switched on."""
    if isinstance(kernel.launcher, JITFunction):
        return kernel.launcher
    return JITFunction(kernel.function, do_not_specialize=kernel.varying)


@cache
def _binder(kernel: Kernel) -> Callable[..., Any]:
    definition = _definition(kernel)
    binder: Callable[..., Any] = create_function_from_signature(
        definition.signature, definition.params, make_backend(_ANY_TARGET)
    )
    return binder


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled form of a kernel, as Triton's cache distinguishes them. `types` and `properties` are by parameter.

    The type of a constant is `constexpr`, and its property is its value. The property of an argument is `D` if it is
    known to be a multiple of 16, 1 if it is known to be 1, and None if its value does not matter.
    """

    kernel: Kernel
    types: tuple[str, ...]
    properties: tuple[object, ...]
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, launch: Launch) -> Variant:
        _, looked_at, _ = _binder(launch.kernel)(**launch.arguments, **launch.constants)
        types, properties = zip(*looked_at, strict=True)
        return cls(launch.kernel, types, properties, tuple(launch.options.items()))

    @property
    def argument_types(self) -> dict[str, str]:
        return dict(zip(self._names, self.types, strict=True))

    @property
    def constants(self) -> dict[str, Any]:
        columns = zip(self._names, self.types, self.properties, strict=True)
        return {name: value for name, kind, value in columns if kind == "constexpr"}

    @property
    def _names(self) -> list[str]:
        return [parameter.name for parameter in _definition(self.kernel).params]

    def compile(self, capability: int) -> CompiledKernel:
        """Compiles the variant for devices of this compute capability, for example 80 for 8.0."""
        target = GPUTarget("cuda", capability, 32)
        definition = _definition(self.kernel)
        bound = {name: self.constants.get(name) for name in self._names}
        looked_at = list(zip(self.types, self.properties, strict=True))
        options, signature, constants, attributes = definition._pack_args(
            make_backend(target), dict(self.options), bound, looked_at, None
        )
        source = ASTSource(definition, signature, constants, attributes)
        return triton.compile(source, target=target, options=options.__dict__)
