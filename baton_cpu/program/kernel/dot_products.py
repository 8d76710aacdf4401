"""Multiplies few rows by a panel of a packed weight. A decode step spends its time in this one loop.

A weight is packed in panels of PANEL_WIDTH outputs. A step is 4 bytes of a row: two bfloat16 numbers or one float32.

    packed weight   [panels, steps, PANEL_WIDTH, step]
    out [rows, PANEL_WIDTH] float32 = x [rows, steps * step] times one panel

A pass is one run over the panel. It sums as many of the panel's outputs, for as many rows of x, as the CPU's vector
registers can hold. With AVX-512 that is a whole panel, each number of which is read once and in the order of memory.
Otherwise more than _MAX_WHOLE_ROWS rows take two passes, each of which computes half of the panel's outputs.

Where the CPU has no products of bfloat16 pairs, x is float32 (`input_like`), and products are float32 too. A sum is
always taken in the order of the steps, so it does not depend on the other rows.
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
_BYTES_AHEAD = 1024  # how far ahead the panel is prefetched

_PANEL_VECTORS = PANEL_WIDTH // LANES
_BFLOATS = ir.VectorType(Bfloat16(), 2 * LANES)


def products_of(max_rows: int, max_whole_rows: int, *, multiplies_pairs: bool) -> Any:
    """Returns an intrinsic with the arguments of `panel_products`, for 1 to `max_rows` rows. Up to `max_whole_rows`
    rows are computed in one pass over the panel, and more rows in two passes, each of which computes half of the
    outputs.

    `multiplies_pairs` says that the CPU multiplies pairs of bfloat16 numbers.
    """

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
                    # A block of `max_rows` rows may be followed by another, which reads the panel again.
                    is_last = num_rows < max_rows and num_vectors == _PANEL_VECTORS
                    _generate_pass(builder, arguments[:4] + arguments[5:6], num_rows, outputs, multiply, is_last)

            switch(builder, arguments[4], max_rows, generate_for)
            return target.get_dummy_value()

        word = types.int64
        return types.void(word, word, word, word, word, word, like), generate

    return products


class _PanelStep:
    """One step of a pass over a panel: 4 bytes of each output, two bfloat16 or one float32. Generates the loads of the
    panel's weights and of the numbers of x.

    `vectors` is the panel's address as an LLVM pointer to vectors, and `rows` has the address of each row of x.
    `outputs` says which vectors of the step the pass computes, and `number` is the step's index, an LLVM value.
    """

    def __init__(self, builder: Any, vectors: Any, rows: list[Any], outputs: range, number: Any) -> None:
        self._builder, self._vectors, self._rows, self._outputs, self._number = builder, vectors, rows, outputs, number

    def weights(self) -> list[Any]:
        """Generates the loads of the step's weights. Returns one vector for each vector of outputs that the pass
        computes.
        """
        first = self._builder.mul(self._number, WORD(_PANEL_VECTORS))
        loaded = []
        for vector in self._outputs:
            place = self._builder.add(first, WORD(vector))
            loaded.append(self._builder.load(self._builder.gep(self._vectors, [place])))
            loaded[-1].align = 4 * LANES
        return loaded

    def numbers(self, kind: ir.Type, *, size: int = 1, place: int = 0) -> Iterator[Any]:
        """Yields an LLVM vector of type `kind` for each row of x, with one of the row's numbers in every lane. A row
        has `size` numbers in this step, of which `place` is the index of the one to load. A pair of bfloat16 that is
        multiplied at once counts as one number, an int32.

        Each number is loaded just before it is needed, because few registers are left.
        """
        place = self._builder.add(self._builder.mul(self._number, WORD(size)), WORD(place))
        for row in self._rows:
            start = self._builder.inttoptr(row, kind.element.as_pointer())
            yield spread(self._builder, self._builder.load(self._builder.gep(start, [place])), kind)

    def again(self) -> _PanelStep:
        """Returns a copy of this step whose weights and numbers of x the compiled code loads again.

        It hides from the compiler that both steps load the same values. Otherwise it would keep them in registers, of
        which there are too few.
        """
        return _PanelStep(self._builder, self._vectors, self._rows, self._outputs, hidden(self._builder, self._number))


def _generate_pass(builder: Any, arguments: Any, num_rows: int, outputs: range, multiply: Any, is_last: bool) -> None:
    """Generates one pass: a loop over the panel's steps that multiplies `num_rows` rows and sums the products.
    `outputs` says which vectors of each step are computed. `is_last` says that this forward does not read the panel
    again.

    `arguments` are LLVM values: `panel`, `x`, `x_stride`, `num_steps` and `out` of `panel_products`. `multiply`
    generates the products of one step, as `_multiply_floats` does. `builder` is llvmlite's IRBuilder, which the code is
    added to.
    """
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
        for offset in range(0, 4 * PANEL_WIDTH, LINE_BYTES):  # a first pass prefetches for the second one too
            ahead = builder.add(builder.mul(number, WORD(4 * PANEL_WIDTH)), WORD(offset + _BYTES_AHEAD))
            prefetch_line(builder, builder.add(panel, ahead), once=is_last)
    new = multiply(builder, _PanelStep(builder, vectors, rows, outputs, number), sums)
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


def _multiply_pairs(builder: Any, step: _PanelStep, sums: list[Any]) -> list[Any]:
    """Generates the products of one step, of bfloat16 pairs, and adds them to `sums`. Returns the new sums. Both lists
    have the LLVM vectors of the first row of x, then those of the next. `builder` is llvmlite's IRBuilder, which the
    code is added to.
    """
    name, kind = "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(FLOATS, [FLOATS, _BFLOATS, _BFLOATS])
    function = declared(builder, name, kind)
    weights, old = [builder.bitcast(weight, _BFLOATS) for weight in step.weights()], iter(sums)
    pairs = (builder.bitcast(pair, _BFLOATS) for pair in step.numbers(INTS))
    return [builder.call(function, [next(old), weight, pair]) for pair in pairs for weight in weights]


def _multiply_halves(builder: Any, step: _PanelStep, sums: list[Any]) -> list[Any]:
    """Generates the products of one step of bfloat16 weights, by float32 multiplications, and adds them to `sums`.
    Returns the new sums. Both lists have the LLVM vectors of the first row of x, then those of the next. `builder` is
    llvmlite's IRBuilder, which the code is added to.

    Weights are loaded twice, once for each half of the pairs, because too few registers are left to keep them.
    """
    for place, half in enumerate((_lower, _upper)):
        weights, old = [half(builder, weight) for weight in step.weights()], iter(sums)
        numbers = step.numbers(FLOATS, size=2, place=place)
        sums = [multiply_add(builder, weight, number, next(old)) for number in numbers for weight in weights]
        step = step.again()
    return sums


def _multiply_floats(builder: Any, step: _PanelStep, sums: list[Any]) -> list[Any]:
    """Generates the products of one step of float32 weights, and adds them to `sums`. Returns the new sums. Both lists
    have the LLVM vectors of the first row of x, then those of the next. `builder` is llvmlite's IRBuilder, which the
    code is added to.
    """
    weights, old = [builder.bitcast(weight, FLOATS) for weight in step.weights()], iter(sums)
    numbers = step.numbers(FLOATS)
    return [multiply_add(builder, weight, number, next(old)) for number in numbers for weight in weights]


def _lower(builder: Any, pairs: Any) -> Any:
    """Generates the first bfloat16 of each pair in LLVM vector `pairs`, as a vector of float32. `builder` is llvmlite's
    IRBuilder, which the code is added to.
    """
    return builder.bitcast(builder.shl(pairs, ir.Constant(INTS, [16] * LANES)), FLOATS)


def _upper(builder: Any, pairs: Any) -> Any:
    """Generates the second bfloat16 of each pair in LLVM vector `pairs`, as a vector of float32. `builder` is
    llvmlite's IRBuilder, which the code is added to.
    """
    return builder.bitcast(builder.and_(pairs, ir.Constant(INTS, [0xFFFF0000] * LANES)), FLOATS)


_products = products_of(MAX_ROWS, _MAX_WHOLE_ROWS, multiplies_pairs=has_bfloat16())


@jit
def panel_products(panel, x, x_stride, num_steps, num_rows, out, like):
    """Multiplies `num_rows` rows of x, 1 to MAX_ROWS, by one panel of a packed weight: PANEL_WIDTH outputs, in
    `num_steps` steps of 4 bytes of each output. Writes the products to `out` [rows, PANEL_WIDTH] float32.

    `panel`, `x` and `out` are addresses. Rows of x lie `x_stride` bytes apart, and have the dtype of
    `input_like(like)`. `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    _products(panel, x, x_stride, num_steps, num_rows, out, like)
