"""What Triton would compile for a launch, and compiling it, both without a device.

Triton itself reads the launch's arguments, so this uses parts of Triton that may change with any version. No service
imports it.
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

_ANY_TARGET = GPUTarget("cuda", 90, 32)  # what Triton looks at in arguments is the same for all of CUDA's


@cache
def _definition(kernel: Kernel) -> JITFunction[Any]:
    """The function to compile, also while the interpreter is on."""
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
    """What is compiled for a launch: the kernel with what Triton's cache tells apart, in the order of its parameters.

    A constant's type is `constexpr`, and its property is its value. An argument's property is `D` where it is known to
    be a multiple of 16, 1 where it is known to be 1, and None where nothing is looked at.
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
        """For devices of this compute capability, such as 80 for 8.0."""
        target = GPUTarget("cuda", capability, 32)
        definition = _definition(self.kernel)
        bound = {name: self.constants.get(name) for name in self._names}
        looked_at = list(zip(self.types, self.properties, strict=True))
        options, signature, constants, attributes = definition._pack_args(
            make_backend(target), dict(self.options), bound, looked_at, None
        )
        source = ASTSource(definition, signature, constants, attributes)
        return triton.compile(source, target=target, options=options.__dict__)
