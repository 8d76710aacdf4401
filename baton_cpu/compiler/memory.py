"""Operations on addresses, for kernels: view memory as an array, and atomically update numbers that threads share."""

from __future__ import annotations

import platform
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton_cpu.compiler.jit import Kernel, jit

_WORD = ir.IntType(64)
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [ir.IntType(32)(1)])}

yield_core = cast("Kernel", types.ExternalFunction("sched_yield", types.int32()))
"""`yield_core()`, for kernels: libc's sched_yield, which lets another thread have the core."""
read_file = cast("Kernel", types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp)))
"""`read_file(fd, address, num_bytes)`, for kernels: libc's read. `write_file` is libc's write."""
write_file = cast("Kernel", types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp)))


@intrinsic
def _pointer(_context, address):
    def generate(_target, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


pointer = cast("Kernel", _pointer)
"""`pointer(address)`, for kernels: turns an integer into a pointer, which numba.carray takes."""


@intrinsic
def _pause(_context):
    def generate(target, builder, _signature, _arguments):
        if platform.machine() in _PAUSES:
            name, arguments = _PAUSES[platform.machine()]
            kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
            builder.call(_declared(builder.module, name, kind), arguments)
        return target.get_dummy_value()

    return types.void(), generate


pause = cast("Kernel", _pause)
"""`pause()`, for kernels: tells the core that this thread is in a spin loop."""


@intrinsic
def _fence(_context):
    def generate(target, builder, _signature, _arguments):
        builder.fence("seq_cst")
        return target.get_dummy_value()

    return types.void(), generate


fence = cast("Kernel", _fence)
"""`fence()`, for kernels: a full memory fence. Other threads see this thread's reads and writes before it as done
before those after it.
"""


@intrinsic
def _load(_context, address):
    def generate(_target, builder, _signature, arguments):
        return builder.load_atomic(_word(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(_context, address, number):
    def generate(target, builder, _signature, arguments):
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "seq_cst", 8)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add(_context, address, number):
    def generate(_target, builder, _signature, arguments):
        return builder.atomic_rmw("add", _word(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _swap_if(_context, address, expected, number):
    def generate(_target, builder, _signature, arguments):
        word = _word(builder, arguments[0])
        seen = builder.cmpxchg(word, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(seen, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


load_word = cast("Kernel", _load)
"""`load_word(address)`, for kernels: atomically reads an aligned int64. Like the operations below, it is sequentially
consistent.
"""
store_word = cast("Kernel", _store)
"""`store_word(address, number)`, for kernels: atomically writes an aligned int64."""
add_to_word = cast("Kernel", _add)
"""`add_to_word(address, number)`, for kernels: atomically adds to an int64. Returns the number that was there before.
"""
swap_word_if = cast("Kernel", _swap_if)
"""`swap_word_if(address, expected, number)`, for kernels: atomically writes `number` if the int64 there is `expected`.
Returns whether it was.
"""


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


def _declared(module: Any, name: str, kind: ir.FunctionType) -> Any:
    return module.globals.get(name) or ir.Function(module, kind, name)


@jit
def address_of(array):
    """Returns the address of the array's first element, as an integer."""
    return array.ctypes.data
