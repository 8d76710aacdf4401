"""Generates vector code for kernels. A vector has LANES float32 numbers, as many as a register of the CPU holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton_cpu.compiler.jit import Kernel

HAS_WIDE_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
"""Whether the CPU has AVX-512, with 32 registers of 16 float32 each. Otherwise kernels count on 16 registers of 8,
which AVX2 has; NEON's 32 registers of 4 hold as much.
"""
LANES = 16 if HAS_WIDE_REGISTERS else 8
LINE_BYTES = 64
FLOAT, INT, WORD = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


def declared(builder: Any, name: str, kind: ir.FunctionType) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def prefetch_line(builder: Any, address: Any, *, once: bool = False) -> None:
    """Generates a prefetch of the cache line at `address`, an LLVM int64. It never faults. `once` tells the CPU that
    the line will be read a single time, so that it does not replace other data in the outer caches. `builder` is
    llvmlite's IRBuilder, which the code is added to.
    """
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    for_reading, locality, data_cache = INT(0), INT(0 if once else 3), INT(1)
    builder.call(function, [builder.inttoptr(address, pointer), for_reading, locality, data_cache])


def spread(builder: Any, number: Any, vector: ir.VectorType) -> Any:
    """Generates a vector of LLVM type `vector` with `number`, an LLVM value, in every lane. `builder` is llvmlite's
    IRBuilder, which the code is added to.
    """
    undefined = ir.Constant(vector, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(INT, vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(undefined, number, INT(0)), undefined, lanes)


def multiply_add(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Generates `left * right + total` for three vectors of LANES float32. `builder` is llvmlite's IRBuilder, which the
    code is added to; the other arguments are LLVM values.
    """
    kind = ir.FunctionType(FLOATS, [FLOATS, FLOATS, FLOATS])
    return builder.call(declared(builder, f"llvm.fmuladd.v{LANES}f32", kind), [left, right, total])


def hidden(builder: Any, word: Any) -> Any:
    """Returns `word`, an index or address, in a form that the compiler does not recognise as the same value. So it
    loads again what lies there, instead of keeping the value of an earlier load in a register. `builder` is llvmlite's
    IRBuilder, which the code is added to. `word` and the result are LLVM values.
    """
    return builder.asm(ir.FunctionType(WORD, [WORD]), "", "=r,0", [word], False)


def load_floats(builder: Any, address: Any, num_vectors: int, element: types.Type) -> list[Any]:
    """Generates loads of `num_vectors` vectors of LANES float32, one after the other, from `address` (an LLVM int64)
    on, and returns them. Memory holds float32 numbers or, if `element` is uint16, the bits of bfloat16 numbers.
    `builder` is llvmlite's IRBuilder, which the code is added to.
    """
    vectors = []
    for place in range(num_vectors):
        if element == types.float32:
            where = builder.inttoptr(builder.add(address, WORD(place * LANES * 4)), FLOATS.as_pointer())
            vector = builder.load(where)
            vector.align = 4
        else:
            where = builder.inttoptr(builder.add(address, WORD(place * LANES * 2)), _HALVES.as_pointer())
            halves = builder.load(where)
            halves.align = 2
            bits = builder.shl(builder.zext(halves, INTS), ir.Constant(INTS, [16] * LANES))
            vector = builder.bitcast(bits, FLOATS)
        vectors.append(vector)
    return vectors


def store_floats(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, builder.inttoptr(address, FLOATS.as_pointer())).align = 4


def sums_of_lanes(builder: Any, vectors: list[Any]) -> Any:
    """Generates the sum of the lanes of each of four vectors of LANES float32. Returns one LLVM vector with the four
    sums, in the vectors' order. `builder` is llvmlite's IRBuilder, which the code is added to.
    """

    def shuffled(left: Any, right: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))

    def folded(left: Any, right: Any, first: list[int], second: list[int]) -> Any:
        return builder.fadd(
            *(
                shuffled(left, right, [quarter + lane for quarter in range(0, LANES, 4) for lane in lanes])
                for lanes in (first, second)
            )
        )

    a, b, c, d = vectors
    ab = folded(a, b, [0, LANES, 1, LANES + 1], [2, LANES + 2, 3, LANES + 3])
    cd = folded(c, d, [0, LANES, 1, LANES + 1], [2, LANES + 2, 3, LANES + 3])
    sums = folded(ab, cd, [0, 1, LANES, LANES + 1], [2, 3, LANES + 2, LANES + 3])
    length = LANES // 2
    while length >= 4:
        sums = builder.fadd(*(shuffled(sums, sums, list(range(start, start + length))) for start in (0, length)))
        length //= 2
    return sums


def switch(builder: Any, number: Any, most: int, generate_for: Callable[[int], None]) -> None:
    """Generates a switch over `number`, an LLVM int64 from 1 to `most`. `generate_for(n)` is called once for each n,
    and generates the code that runs if `number` is n. `builder` is llvmlite's IRBuilder, which the code is added to.
    """
    cases = [builder.append_basic_block("case") for _ in range(most)]
    after = builder.append_basic_block("after")
    choice = builder.switch(number, cases[-1])
    for num, case in enumerate(cases, 1):
        choice.add_case(WORD(num), case)
        builder.position_at_end(case)
        generate_for(num)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic
def _prefetch(_context, address):
    def generate(target, builder, _signature, arguments):
        prefetch_line(builder, arguments[0])
        return target.get_dummy_value()

    return types.void(types.int64), generate


prefetch = cast("Kernel", _prefetch)
"""`prefetch(address)`, for kernels: prefetches the cache line at that address. Never faults."""


@intrinsic
def _fused(_context, left, right, total):
    def generate(_target, builder, _signature, arguments):
        kind = ir.FunctionType(FLOAT, [FLOAT, FLOAT, FLOAT])
        return builder.call(declared(builder, "llvm.fma.f32", kind), arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


fused_multiply_add = cast("Kernel", _fused)
"""`fused_multiply_add(left, right, total)`, for kernels: returns left * right + total, rounded once wherever it is
used. The compiler may round any other such sum once or twice, and differently from place to place.
"""
