"""Products of few rows with a panel of a packed weight: the one loop in which a decode step spends its time.

    packed weight   [panels, steps, PANEL_WIDTH, step]   a step: two bfloat16 or one float32, 4 bytes of a row
    out [rows, PANEL_WIDTH] float32 = x [rows, steps * step] times one panel

A pass takes as many of a panel's outputs and rows of x as the CPU's vector registers hold sums of: with AVX-512 whole
panels, each number of which is read once and in the order of memory, else half of each step and then the other.
Where the CPU has no products of bfloat16 pairs they are made of float32 ones, and x is float32 (`input_like`).
A sum is taken in the order of the steps whatever the pass, so that it does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from baton_cpu.compiler.jit import jit
from baton_cpu.compiler.numbers import Bfloat16, has_bfloat16
from baton_cpu.compiler.vectors import (
    FLOAT,
    FLOATS,
    HAS_WIDE_REGISTERS,
    INTS,
    LANES,
    LINE_BYTES,
    WORD,
    declared,
    hidden,
    multiply_add,
    prefetch_line,
    spread,
    switch,
)

PANEL_WIDTH = 32
MAX_ROWS, _MAX_WHOLE_ROWS = (8, 8) if HAS_WIDE_REGISTERS else (5, 2)
_BYTES_AHEAD = 1024  # of the panel, asked for before they are needed

_PANEL_VECTORS = PANEL_WIDTH // LANES
_BFLOATS = ir.VectorType(Bfloat16(), 2 * LANES)


def products_of(max_rows: int, max_whole_rows: int, *, multiplies_pairs: bool) -> Any:
    """An intrinsic as `panel_products` is: for 1 to `max_rows` rows, of whole steps for up to `max_whole_rows`."""

    @intrinsic
    def products(_context, panel, x, x_stride, num_steps, num_rows, out, like):
        if like.dtype == types.uint16:
            multiply = _multiply_pairs if multiplies_pairs else _multiply_halves
        else:
            multiply = _multiply_floats

        def generate(target, builder, _signature, arguments):
            def generate_for(num_rows: int) -> None:
                num_vectors = _PANEL_VECTORS if num_rows <= max_whole_rows else _PANEL_VECTORS // 2
                for first in range(0, _PANEL_VECTORS, num_vectors):
                    outputs = range(first, first + num_vectors)
                    # Of the passes over a panel: of as many rows as there can be another may follow.
                    is_last = num_rows < max_rows and num_vectors == _PANEL_VECTORS
                    _generate_pass(builder, arguments[:4] + arguments[5:6], num_rows, outputs, multiply, is_last)

            switch(builder, arguments[4], max_rows, generate_for)
            return target.get_dummy_value()

        word = types.int64
        return types.void(word, word, word, word, word, word, like), generate

    return products


class _Step:
    """What one step of a pass reads."""

    def __init__(self, builder: Any, vectors: Any, rows: list[Any], outputs: range, number: Any) -> None:
        self._builder, self._vectors, self._rows, self._outputs, self._number = builder, vectors, rows, outputs, number

    def weights(self) -> list[Any]:
        first = self._builder.mul(self._number, WORD(_PANEL_VECTORS))
        loaded = []
        for vector in self._outputs:
            place = self._builder.add(first, WORD(vector))
            loaded.append(self._builder.load(self._builder.gep(self._vectors, [place])))
            loaded[-1].align = 4 * LANES
        return loaded

    def numbers(self, kind: ir.Type, *, size: int = 1, place: int = 0) -> Iterator[Any]:
        """Of each row, in every lane: number `place` of the step's `size`. Loaded just before it is wanted: few
        registers are left for it.
        """
        place = self._builder.add(self._builder.mul(self._number, WORD(size)), WORD(place))
        for row in self._rows:
            start = self._builder.inttoptr(row, kind.element.as_pointer())
            yield spread(self._builder, self._builder.load(self._builder.gep(start, [place])), kind)

    def again(self) -> _Step:
        """The same, to be loaded once more."""
        return _Step(self._builder, self._vectors, self._rows, self._outputs, hidden(self._builder, self._number))


def _generate_pass(builder: Any, arguments: Any, num_rows: int, outputs: range, multiply: Any, is_last: bool) -> None:
    """`outputs`: which vectors of each step. `is_last`: the panel is not read again in this forward."""
    panel, x, x_stride, num_steps, out = arguments
    vectors = builder.inttoptr(panel, INTS.as_pointer())
    rows = [builder.add(x, builder.mul(x_stride, WORD(row))) for row in range(num_rows)]
    before, loop, after = builder.block, builder.append_basic_block("step"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(WORD)
    number.add_incoming(WORD(0), before)
    sums = [builder.phi(FLOATS) for _ in range(num_rows * len(outputs))]
    for total in sums:
        total.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
    if outputs[0] == 0:
        for offset in range(0, 4 * PANEL_WIDTH, LINE_BYTES):  # what the other pass reads, too
            ahead = builder.add(builder.mul(number, WORD(4 * PANEL_WIDTH)), WORD(offset + _BYTES_AHEAD))
            prefetch_line(builder, builder.inttoptr(builder.add(panel, ahead), INTS.as_pointer()), once=is_last)
    new = multiply(builder, _Step(builder, vectors, rows, outputs, number), sums)
    following = builder.add(number, WORD(1))
    number.add_incoming(following, loop)
    for total, value in zip(sums, new, strict=True):
        total.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_steps), loop, after)
    builder.position_at_end(after)
    results = builder.inttoptr(out, FLOAT.as_pointer())
    for place_of, value in enumerate(new):
        row, vector = divmod(place_of, len(outputs))
        place = WORD((row * _PANEL_VECTORS + outputs[vector]) * LANES)
        address = builder.bitcast(builder.gep(results, [place]), FLOATS.as_pointer())
        builder.store(value, address).align = 4


def _multiply_pairs(builder: Any, step: _Step, sums: list[Any]) -> list[Any]:
    """New sums, of each row's vectors in turn."""
    name, kind = "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(FLOATS, [FLOATS, _BFLOATS, _BFLOATS])
    function = declared(builder, name, kind)
    weights, old = [builder.bitcast(weight, _BFLOATS) for weight in step.weights()], iter(sums)
    pairs = (builder.bitcast(pair, _BFLOATS) for pair in step.numbers(INTS))
    return [builder.call(function, [next(old), weight, pair]) for pair in pairs for weight in weights]


def _multiply_halves(builder: Any, step: _Step, sums: list[Any]) -> list[Any]:
    """Weights are loaded twice: registers that kept them from one half to the other would be too many."""
    for place, half in enumerate((_lower, _upper)):
        weights, old = [half(builder, weight) for weight in step.weights()], iter(sums)
        numbers = step.numbers(FLOATS, size=2, place=place)
        sums = [multiply_add(builder, weight, number, next(old)) for number in numbers for weight in weights]
        step = step.again()
    return sums


def _multiply_floats(builder: Any, step: _Step, sums: list[Any]) -> list[Any]:
    weights, old = [builder.bitcast(weight, FLOATS) for weight in step.weights()], iter(sums)
    numbers = step.numbers(FLOATS)
    return [multiply_add(builder, weight, number, next(old)) for number in numbers for weight in weights]


def _lower(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.shl(pairs, ir.Constant(INTS, [16] * LANES)), FLOATS)


def _upper(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.and_(pairs, ir.Constant(INTS, [0xFFFF0000] * LANES)), FLOATS)


_products = products_of(MAX_ROWS, _MAX_WHOLE_ROWS, multiplies_pairs=has_bfloat16())


@jit
def panel_products(panel, x, x_stride, num_steps, num_rows, out, like):
    """Of addresses: `x_stride` bytes from one row of x to the next, 1 .. MAX_ROWS rows, of `input_like` numbers.
    `like` is an array of the weights' bits: uint16 for bfloat16, or float32.
    """
    _products(panel, x, x_stride, num_steps, num_rows, out, like)
