"""Products of few rows with a panel of a packed weight: the one loop in which a decode step spends its time.

    packed weight   [panels, steps, PANEL_WIDTH, step]   a step is what one instruction takes of a row: two bfloat16 or
                                                         one float32
    out [rows, PANEL_WIDTH] float32 = x [rows, steps * step] times one panel

Each number of a panel is read once, in the order of memory, for up to MAX_ROWS rows, whose sums stay in registers.
Where the CPU has no products of bfloat16 pairs they are made of float32 ones.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from common.model.cpu_kernel import jit
from common.model.fused.numbers import Bfloat16, has_bfloat16
from common.model.fused.vectors import (
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    WORD,
    declared,
    multiply_add,
    prefetch_line,
    spread,
)
from common.model.fused.weight_memory import WeightMemory

PANEL_WIDTH = 32
MAX_ROWS = 8
_LINES_AHEAD = 16  # of the panel, asked for before they are needed

_BFLOATS = ir.VectorType(Bfloat16(), 2 * LANES)


def step_of(dtype: torch.dtype) -> int:
    """Numbers of a row in a step. `dtype` is bfloat16 or float32."""
    return {torch.bfloat16: 2, torch.float32: 1}[dtype]


def packed(weight: Tensor, memory: WeightMemory) -> Tensor:
    """`weight` [outputs, inputs], whose inputs are whole steps, in panels. Missing outputs of the last are 0."""
    num_outputs, num_inputs = weight.shape
    step = step_of(weight.dtype)
    assert num_inputs % step == 0
    num_panels = -(-num_outputs // PANEL_WIDTH)
    storage = memory.zeros(num_panels * PANEL_WIDTH * num_inputs, weight.dtype)
    panels = storage.view(num_panels, num_inputs // step, PANEL_WIDTH, step)
    whole = num_outputs // PANEL_WIDTH
    columns = weight.unflatten(1, (-1, step))
    panels[:whole] = columns[: whole * PANEL_WIDTH].unflatten(0, (whole, PANEL_WIDTH)).transpose(1, 2)
    if rest := num_outputs - whole * PANEL_WIDTH:
        panels[whole, :, :rest] = columns[-rest:].transpose(0, 1)
    return panels


def _kernel_of(num_rows: int) -> Any:
    @intrinsic
    def products(_context, panel, x, x_stride, num_steps, out, like):  # type: ignore[no-untyped-def]
        make_step = _bfloat16_step if like.dtype == types.uint16 else _float32_step

        def generate(target, builder, _signature, arguments):  # type: ignore[no-untyped-def]
            _generate(builder, arguments, num_rows, make_step)
            return target.get_dummy_value()

        word = types.int64
        return types.void(word, word, word, word, word, like), generate

    return products


def _generate(builder: Any, arguments: Any, num_rows: int, make_step: Any) -> None:
    panel, x, x_stride, num_steps, out, _ = arguments
    vectors = builder.inttoptr(panel, INTS.as_pointer())
    starts = [builder.add(x, builder.mul(x_stride, WORD(row))) for row in range(num_rows)]
    rows = [builder.inttoptr(start, INT.as_pointer()) for start in starts]
    before, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(WORD)
    number.add_incoming(WORD(0), before)
    sums = [builder.phi(FLOATS) for _ in range(num_rows * 2)]
    for total in sums:
        total.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
    place = builder.mul(number, WORD(2))
    weights = []
    for half in range(2):
        address = builder.gep(vectors, [builder.add(place, WORD(half))])
        prefetch_line(builder, builder.gep(vectors, [builder.add(place, WORD(half + _LINES_AHEAD))]))
        weight = builder.load(address)
        weight.align = 64
        weights.append(weight)
    multiply = make_step(builder, weights)
    new: list[Any] = []
    for row in range(num_rows):
        new += multiply(builder.load(builder.gep(rows[row], [number])), sums[2 * row : 2 * row + 2])
    following = builder.add(number, WORD(1))
    number.add_incoming(following, loop)
    for total, value in zip(sums, new, strict=True):
        total.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, after)
    builder.position_at_end(after)
    results = builder.inttoptr(out, FLOAT.as_pointer())
    for place_of, value in enumerate(new):
        address = builder.bitcast(builder.gep(results, [WORD(place_of * LANES)]), FLOATS.as_pointer())
        builder.store(value, address).align = 4


def _bfloat16_step(builder: Any, weights: list[Any]) -> Any:
    if not has_bfloat16():
        return _bfloat16_step_of_float32(builder, weights)
    name, kind = "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(FLOATS, [FLOATS, _BFLOATS, _BFLOATS])
    function = declared(builder, name, kind)
    pairs = [builder.bitcast(weight, _BFLOATS) for weight in weights]

    def multiply(pair: Any, sums: list[Any]) -> list[Any]:
        everywhere = builder.bitcast(spread(builder, pair, INTS), _BFLOATS)
        return [builder.call(function, [total, weight, everywhere]) for total, weight in zip(sums, pairs, strict=True)]

    return multiply


def _bfloat16_step_of_float32(builder: Any, weights: list[Any]) -> Any:
    def halves(bits: Any, kind: ir.Type, floats: ir.Type) -> list[Any]:
        def constant(number: int) -> Any:
            return ir.Constant(kind, [number] * LANES) if isinstance(kind, ir.VectorType) else kind(number)

        low, high = builder.shl(bits, constant(16)), builder.and_(bits, constant(0xFFFF0000))
        return [builder.bitcast(low, floats), builder.bitcast(high, floats)]

    split = [halves(weight, INTS, FLOATS) for weight in weights]

    def multiply(pair: Any, sums: list[Any]) -> list[Any]:
        everywhere = [spread(builder, number, FLOATS) for number in halves(pair, INT, FLOAT)]
        for place, parts in enumerate(split):
            for part, number in zip(parts, everywhere, strict=True):
                sums[place] = multiply_add(builder, part, number, sums[place])
        return sums

    return multiply


def _float32_step(builder: Any, weights: list[Any]) -> Any:
    floats = [builder.bitcast(weight, FLOATS) for weight in weights]

    def multiply(number: Any, sums: list[Any]) -> list[Any]:
        everywhere = spread(builder, builder.bitcast(number, FLOAT), FLOATS)
        return [multiply_add(builder, part, everywhere, total) for part, total in zip(floats, sums, strict=True)]

    return multiply


_one, _two, _three, _four, _five, _six, _seven, _eight = (_kernel_of(num_rows) for num_rows in range(1, MAX_ROWS + 1))


@jit
def panel_products(panel, x, x_stride, num_steps, num_rows, out, like):  # type: ignore[no-untyped-def]
    """Of addresses: `x_stride` bytes from one row of x to the next, 1 .. MAX_ROWS rows. `like` is an array of the
    weights' bits: uint16 for bfloat16, or float32.
    """
    if num_rows == 8:
        _eight(panel, x, x_stride, num_steps, out, like)
    elif num_rows == 1:
        _one(panel, x, x_stride, num_steps, out, like)
    elif num_rows == 2:
        _two(panel, x, x_stride, num_steps, out, like)
    elif num_rows == 3:
        _three(panel, x, x_stride, num_steps, out, like)
    elif num_rows == 4:
        _four(panel, x, x_stride, num_steps, out, like)
    elif num_rows == 5:
        _five(panel, x, x_stride, num_steps, out, like)
    elif num_rows == 6:
        _six(panel, x, x_stride, num_steps, out, like)
    else:
        _seven(panel, x, x_stride, num_steps, out, like)
