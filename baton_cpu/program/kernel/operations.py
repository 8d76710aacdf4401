"""What a program's operations do, each cut into items that threads take as they come.

    EMBED    rows of a table                              an item: some rows
    NORM     RMS norm, or a copy                          an item: some rows
    LINEAR   (norm) ▸ product ▸ store, add, gate or logits an item: a panel of the weight, up to ITEM_ROWS
    LARGEST  the first largest of the logits               an item: a row of them
    ATTEND   (norm) ▸ rotate ▸ write KV ▸ attend           an item: parts of one request of few new tokens
    INPUT_NORM, PREPARE_CHUNKS, ATTEND_CHUNKS              what many tokens have of their own; else without items

What a LINEAR norms of few tokens each thread norms for itself: that is faster than one more wait for each other. From
MANY_TOKENS on INPUT_NORM does it for all. Requests of more than MAX_QUERIES new tokens attend as chunks.

Where the CPU has no products of bfloat16 pairs, what a LINEAR reads is float32 (`input_like`): norms, attention and
gates leave it so, rounded to bfloat16, and rows of other buffers are made so on the way in.

Numbers are rounded to the model's dtype where the model's own layers round them: after a norm, a linear layer, a sum.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, cast

import numba
import numpy as np
from numba.extending import overload

from baton_cpu.compiler.jit import Kernel, jit
from baton_cpu.compiler.memory import pointer
from baton_cpu.compiler.numbers import read
from baton_cpu.program.kernel.dot_products import MAX_ROWS, PANEL_WIDTH, panel_products
from baton_cpu.program.kernel.numbers import copied, input_like, kept, rounded, silu


class Kind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    ATTEND = 3
    INPUT_NORM = 4
    PREPARE_CHUNKS = 5
    ATTEND_CHUNKS = 6
    LARGEST = 7


class Store(IntEnum):
    """What a LINEAR does with its output: keep it; add it to what is there; make silu(first) * second of two halves of
    each panel; keep it as float32.
    """

    KEEP = 0
    ADD = 1
    GATE = 2
    LOGITS = 3


class Field(IntEnum):
    """Of an operation's row of int64; addresses of weights, 0 where there is none."""

    KIND = 0
    SOURCE = 1  # buffers, by number
    TARGET = 2
    TARGET_OFFSET = 3  # in elements
    WEIGHT = 4
    BIAS = 5
    NORM = 6
    KEY_NORM = 7
    WIDTH = 8  # of the input
    NUM_OUTPUTS = 9
    NUM_PANELS = 10
    STORE = 11
    SELECTED_ROWS = 12  # whether only the rows whose logits are wanted
    LAYER = 13
    NUM_HEADS = 14
    NUM_KV_HEADS = 15
    HEAD_DIM = 16
    SHOWS_LAYER = 17
    NORMED = 18  # the buffer that INPUT_NORM fills
    COPIED = 19  # whether the source's rows are no input yet: to be normed, or made `input_like`


class Call(IntEnum):
    """Of the int64 that describe one run; addresses of arrays of int64 unless ForwardInput says otherwise."""

    OPERATIONS = 0
    NUM_OPERATIONS = 1
    NUMBERS = 2
    NUM_TOKENS = 3
    NUM_ROWS = 4
    NUM_SELECTED = 5
    SELECTED = 6
    INPUT_IDS = 7
    POSITIONS = 8
    OUT_CACHE_LOC = 9
    TABLE = 10
    TABLE_WIDTH = 11
    REQ_POOL_INDICES = 12
    SEQ_LENS = 13
    STARTS = 14
    ATTENDED = 15
    ATTENDED_WIDTH = 16
    NUM_MASKED = 17
    MAX_SEQ_LEN = 18
    KV = 19
    NUM_SLOTS = 20
    COSINES = 21
    SINES = 22
    SCRATCH = 23
    SCRATCH_BYTES = 24  # of a thread
    NUM_KEY_PARTS = 25
    KEY_PARTS = 26  # [n, 2]: a row of more than MAX_QUERIES new tokens, the position of the first key
    NUM_QUERY_PARTS = 27
    QUERY_PARTS = 28  # [n, 2]: such a row, the first of its new tokens
    PACKED = 29
    PACKED_STARTS = 30  # [NUM_ROWS + 1], in tokens
    LARGEST = 31  # [NUM_SELECTED], as Largest has them; the second are bytes
    NOT_FINITE = 32
    NUM_GROUPS = 33  # of a request's parts, in ATTEND
    PARTS = 34  # what they leave, with more than one group: of each request in turn, [parts of MAX_SEQ_LEN, ...]
    GROUPS_ENDED = 35  # [NUM_ROWS], 0 between two operations
    NUM_THREADS = 36
    BUFFERS = 37  # address and elements of a row, of each


ITEM_TOKENS = 16  # of EMBED and NORM
ITEM_ROWS = 256  # of LINEAR: their inputs stay in a core's second cache for all its panels
MANY_TOKENS = 64
_LARGEST_BLOCK = 512
_INFINITY = np.int32(0x7F800000)  # as bits
_NAN_ORDER = np.int32(0x7FFFFFFF)
_WORDS = np.int64


array_at = cast("Kernel", numba.carray)  # type: ignore[attr-defined]


@jit
def words(address, number):
    return array_at(pointer(address), (number,), _WORDS)


def _elements(address: int, number: int, like: Any) -> Any:
    raise NotImplementedError("in kernels only")


@overload(_elements)
def _elements_like(address, number, like):
    element = like.dtype
    return lambda address, number, like: array_at(pointer(address), (number,), element)


elements = cast("Kernel", _elements)
"""`elements(address, number, like)`: so many elements of `like`'s dtype, there."""


@jit
def _normalise(source, weight, epsilon, target, like):
    """One row, arrays of its width."""
    total = np.float32(0)
    for i in range(source.shape[0]):
        number = read(source[i])
        total += number * number
    factor = np.float32(1) / np.sqrt(total / np.float32(source.shape[0]) + np.float32(epsilon))
    for i in range(source.shape[0]):
        target[i] = kept(read(weight[i]) * read(rounded(read(source[i]) * factor, like)), target, like)


@jit
def buffer_row(call, number, row, width, offset, like):
    base = call[Call.BUFFERS + 2 * number]
    length = call[Call.BUFFERS + 2 * number + 1]
    return elements(base + (row * length + offset) * like.itemsize, width, like)


@jit
def copy_elements(source, target):
    """Assigning slices does the same, and the check of their shapes takes a second to compile."""
    for i in range(source.shape[0]):
        target[i] = copied(source[i], target)


@jit
def embed(call, fields, item, like):
    width = fields[Field.WIDTH]
    ids = words(call[Call.INPUT_IDS], call[Call.NUM_TOKENS])
    for token in range(item * ITEM_TOKENS, min(call[Call.NUM_TOKENS], (item + 1) * ITEM_TOKENS)):
        source = elements(fields[Field.WEIGHT] + ids[token] * width * like.itemsize, width, like)
        target = buffer_row(call, fields[Field.TARGET], token, width, fields[Field.TARGET_OFFSET], like)
        copy_elements(source, target)


@jit
def norm(call, fields, epsilon, item, target_like, like):
    """To a buffer of elements like `target_like`."""
    width = fields[Field.WIDTH]
    for token in range(item * ITEM_TOKENS, min(call[Call.NUM_TOKENS], (item + 1) * ITEM_TOKENS)):
        source = buffer_row(call, fields[Field.SOURCE], token, width, 0, like)
        target = buffer_row(call, fields[Field.TARGET], token, width, fields[Field.TARGET_OFFSET], target_like)
        if fields[Field.NORM]:
            _normalise(source, elements(fields[Field.NORM], width, like), epsilon, target, like)
        else:
            copy_elements(source, target)


@jit
def normalise_input(call, fields, epsilon, scratch, like):
    """The rows that a LINEAR reads, where they are normed or selected or not yet its input, to `scratch`."""
    width, inputs = fields[Field.WIDTH], input_like(like)
    num_rows = call[Call.NUM_SELECTED] if fields[Field.SELECTED_ROWS] else call[Call.NUM_TOKENS]
    selected = words(call[Call.SELECTED], num_rows)
    is_selected = fields[Field.SELECTED_ROWS] and call[Call.SELECTED]
    for row in range(num_rows):
        token = selected[row] if is_selected else row
        source = buffer_row(call, fields[Field.SOURCE], token, width, 0, like)
        target = elements(scratch + row * width * inputs.itemsize, width, inputs)
        if fields[Field.NORM]:
            _normalise(source, elements(fields[Field.NORM], width, like), epsilon, target, like)
        else:
            copy_elements(source, target)


@jit
def linear(call, fields, item, x, x_stride, num_rows, sums_address, like):
    """`x`: the address of the input's rows, `x_stride` bytes apart; `sums_address`: scratch for one block's sums."""
    width, num_outputs = fields[Field.WIDTH], fields[Field.NUM_OUTPUTS]
    num_steps = width * like.itemsize // 4
    panel_bytes = num_steps * PANEL_WIDTH * 4
    sums = array_at(pointer(sums_address), (MAX_ROWS * PANEL_WIDTH,), np.float32)
    store = fields[Field.STORE]
    panel, first_row = item % fields[Field.NUM_PANELS], item // fields[Field.NUM_PANELS] * ITEM_ROWS
    last_row = min(num_rows, first_row + ITEM_ROWS)
    weight = fields[Field.WEIGHT] + panel * panel_bytes
    for start in range(first_row, last_row, MAX_ROWS):
        block = min(MAX_ROWS, last_row - start)
        panel_products(weight, x + start * x_stride, x_stride, num_steps, block, sums_address, like)
        for m in range(block):
            row = sums[m * PANEL_WIDTH : (m + 1) * PANEL_WIDTH]
            _store(call, fields, store, start + m, panel, num_outputs, row, like)


@jit
def _store(call, fields, store, row, panel, num_outputs, sums, like):
    base = call[Call.BUFFERS + 2 * fields[Field.TARGET]]
    length = call[Call.BUFFERS + 2 * fields[Field.TARGET] + 1]
    if store == Store.GATE:
        half, inputs = PANEL_WIDTH // 2, input_like(like)
        place = row * length + panel * half
        target = elements(base + place * inputs.itemsize, half, inputs)
        for i in range(half):
            gate = read(rounded(silu(sums[i]), like))
            target[i] = kept(gate * sums[half + i], target, like)
        return
    first = panel * PANEL_WIDTH
    num = min(PANEL_WIDTH, num_outputs - first)
    if fields[Field.BIAS]:
        bias = elements(fields[Field.BIAS] + first * like.itemsize, num, like)
        for i in range(num):
            sums[i] += read(bias[i])
    if store == Store.LOGITS:
        logits = array_at(pointer(base + (row * length + first) * 4), (num,), np.float32)
        for i in range(num):
            logits[i] = read(rounded(sums[i], like))
        return
    target = elements(base + (row * length + fields[Field.TARGET_OFFSET] + first) * like.itemsize, num, like)
    if store == Store.ADD:
        for i in range(num):
            target[i] = rounded(read(target[i]) + read(rounded(sums[i], like)), like)
    else:
        for i in range(num):
            target[i] = rounded(sums[i], like)


@jit
def _order(bits):
    """Of a float32 by its bits: integers in the same order, both zeros alike, NaN above all."""
    magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
    signed = magnitude if bits >= 0 else np.int32(-magnitude)
    return _NAN_ORDER if magnitude > _INFINITY else signed


@jit
def find_largest(bits):
    """The place of the first of the largest float32, or of the first NaN, of an array of their bits."""
    best, best_start = np.int32(-_NAN_ORDER), 0
    for start in range(0, bits.shape[0], _LARGEST_BLOCK):
        block = bits[start : min(bits.shape[0], start + _LARGEST_BLOCK)]
        largest = np.int32(-_NAN_ORDER)
        for i in range(block.shape[0]):
            largest = max(largest, _order(block[i]))
        if largest > best:
            best, best_start = largest, start
    for i in range(best_start, bits.shape[0]):
        if _order(bits[i]) == best:
            return i
    return 0


@jit
def largest(call, fields, row):
    base = call[Call.BUFFERS + 2 * fields[Field.SOURCE]]
    length = call[Call.BUFFERS + 2 * fields[Field.SOURCE] + 1]
    bits = array_at(pointer(base + row * length * 4), (fields[Field.WIDTH],), np.int32)
    place = find_largest(bits)
    words(call[Call.LARGEST], row + 1)[row] = place
    array_at(pointer(call[Call.NOT_FINITE]), (row + 1,), np.uint8)[row] = (bits[place] & _NAN_ORDER) >= _INFINITY
