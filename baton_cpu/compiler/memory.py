"""What a kernel may do with an address: see an array there, change a number that other threads change too."""

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
read_file = cast("Kernel", types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp)))
"""libc's: file descriptor, address of the buffer, its bytes."""
write_file = cast("Kernel", types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp)))


@intrinsic
def _pointer(_context, address):
    def generate(_target, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


pointer = cast("Kernel", _pointer)
"""`pointer(address)` is what numba.carray takes."""


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
"""Tell the core that this thread spins."""


@intrinsic
def _fence(_context):
    def generate(target, builder, _signature, _arguments):
        builder.fence("seq_cst")
        return target.get_dummy_value()

    return types.void(), generate


fence = cast("Kernel", _fence)
"""What this thread wrote and read before it, others see before what it writes and reads after it."""


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
"""Of an aligned int64 that other threads write; so do the following, each ordered among all of them."""
store_word = cast("Kernel", _store)
add_to_word = cast("Kernel", _add)
"""Returns what was there before."""
swap_word_if = cast("Kernel", _swap_if)
"""`swap_word_if(address, expected, number)`: write `number` where `expected` is; says whether it was."""


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


def _declared(module: Any, name: str, kind: ir.FunctionType) -> Any:
    return module.globals.get(name) or ir.Function(module, kind, name)


@jit
def address_of(array):
    return array.ctypes.data
