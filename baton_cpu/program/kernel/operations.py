"""The operations of programs. Each is cut into items, the units of work that threads take one after the other.

    EMBED    rows of a table                               an item: some rows
    NORM     RMS norm, or a copy                           an item: some rows
    LINEAR   (norm) ▸ product ▸ store, add, gate or logits an item: a panel of the weight, up to ITEM_ROWS
    LARGEST  the first largest of the logits               an item: a row of them
    ATTEND   (norm) ▸ rotate ▸ write KV ▸ attend           an item: parts of one request of few new tokens
    INPUT_NORM, PREPARE_CHUNKS, ATTEND_CHUNKS              only for many tokens; otherwise they have no items
    ROUTE, EXPERTS_GATE, EXPERTS_DOWN                      a layer of experts: see experts.py

A LINEAR may normalise its input. With few tokens each thread does that for itself, which is faster than waiting for the
other threads once more. With MANY_TOKENS or more, INPUT_NORM does it before, for all threads. Requests with more than
MAX_QUERIES new tokens attend as chunks.

A LINEAR reads float32 where the CPU has no products of bfloat16 pairs (`input_like`). Norms, attention and gates then
write float32 numbers that are rounded to bfloat16, and rows of other buffers are converted first.

Numbers are rounded to the model's dtype where the model's own layers round them: after a norm, a linear layer, a sum.
In the functions here, `like` is an array of the model's dtype (uint16 for bfloat16), whose elements are not read. Call
and Field explain the words of `call` and `fields`.
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
    """The kinds of operations that a program consists of. A program is a forward as a list of operations."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ATTEND = 3
    INPUT_NORM = 4
    PREPARE_CHUNKS = 5
    ATTEND_CHUNKS = 6
    LARGEST = 7
    ROUTE = 8
    EXPERTS_GATE = 9
    EXPERTS_DOWN = 10


class Store(IntEnum):
    """Says how a matrix product (LINEAR) stores its output in its target buffer. KEEP overwrites the target. ADD adds
    to it. GATE stores silu(first half) * second half of the outputs of each panel. LOGITS overwrites a float32 buffer.
    """

    KEEP = 0
    ADD = 1
    GATE = 2
    LOGITS = 3


class Field(IntEnum):
    """Indices into the row of int64 that describes one operation of a program. Weights are given by their addresses; 0
    means that there is none.
    """

    KIND = 0
    SOURCE = 1  # the number of a buffer, as TARGET is
    TARGET = 2
    TARGET_OFFSET = 3  # in elements
    WEIGHT = 4
    BIAS = 5
    NORM = 6
    KEY_NORM = 7
    WIDTH = 8  # of the input's rows, in elements
    NUM_OUTPUTS = 9
    NUM_PANELS = 10
    STORE = 11
    SELECTED_ROWS = 12  # whether only the rows whose logits are wanted are computed
    LAYER = 13
    NUM_HEADS = 14
    NUM_KV_HEADS = 15
    HEAD_DIM = 16
    SHOWS_LAYER = 17
    NORMED = 18  # the buffer that INPUT_NORM or ROUTE fills
    COPIED = 19  # whether the source's rows must first be normalised or converted to `input_like`
    SOURCE_OFFSET = 20  # in elements, for NORM
    NUM_EXPERTS = 21
    NUM_CHOSEN = 22  # experts of a token
    ROUTES = 23  # the buffer of the tokens' experts and their weights
    WEIGHTS_ADD_UP = 24  # whether the weights of a token's experts are divided by their sum
    ROUNDS_WEIGHTS = 25  # whether these weights are rounded to the model's dtype


class Call(IntEnum):
    """Indices into the int64 words that describe one run of a program. Arrays are given by their addresses. Arrays of
    indices, lengths and counts hold int64, ATTENDED and NOT_FINITE bool, NUMBERS float64, PARTS float32, and KV,
    PACKED, COSINES and SINES the model's dtype.
    """

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
    SCRATCH_BYTES = 24  # for each thread
    NUM_KEY_PARTS = 25
    KEY_PARTS = 26  # [n, 2]: a row with more than MAX_QUERIES new tokens, the position of its panel's first key
    NUM_QUERY_PARTS = 27
    QUERY_PARTS = 28  # [n, 2]: such a row, the index of the first of some new tokens
    PACKED = 29
    PACKED_STARTS = 30  # [NUM_ROWS + 1], in tokens
    LARGEST = 31  # [NUM_SELECTED] int64, for `common.sampling.operators.Largest`
    NOT_FINITE = 32  # [NUM_SELECTED] bool, for Largest too
    NUM_GROUPS = 33  # into which ATTEND divides a request's parts
    PARTS = 34  # the parts' results, if there are several groups: for each request [parts of MAX_SEQ_LEN, ...]
    GROUPS_ENDED = 35  # [NUM_ROWS], how many groups of a request have ended; 0 between two operations
    NUM_THREADS = 36
    BUFFERS = 37  # two words for each buffer: its address, and the elements of a row


ITEM_TOKENS = 16  # tokens of an item of EMBED or NORM
ITEM_ROWS = 256  # rows of an item of LINEAR: they stay in a core's second-level cache for all its panels
MANY_TOKENS = 64
_LARGEST_BLOCK = 512
_INFINITY = np.int32(0x7F800000)  # the bits of infinity
_NAN_ORDER = np.int32(0x7FFFFFFF)
_WORDS = np.int64


array_at = cast("Kernel", numba.carray)  # type: ignore[attr-defined]


@jit
def words(address, number):
    """Returns an array of the `number` int64 at address `address`, which shares their memory."""
    return array_at(pointer(address), (number,), _WORDS)


def _elements(address: int, number: int, like: Any) -> Any:
    raise NotImplementedError("in kernels only")


@overload(_elements)
def _elements_like(address, number, like):
    element = like.dtype
    return lambda address, number, like: array_at(pointer(address), (number,), element)


elements = cast("Kernel", _elements)
"""`elements(address, number, like)`, for kernels: returns `number` elements of `like`'s dtype at `address`, as an
array.
"""


@jit
def normalise(source, weight, epsilon, target, like):
    """RMS-normalises one row, array `source`, into array `target`. `weight` is an array of the same length, and
    `epsilon` is added to the mean of the squares. The result is rounded to the dtype of array `like`, even if `target`
    is float32.
    """
    total = np.float32(0)
    for i in range(source.shape[0]):
        number = read(source[i])
        total += number * number
    factor = np.float32(1) / np.sqrt(total / np.float32(source.shape[0]) + np.float32(epsilon))
    for i in range(source.shape[0]):
        target[i] = kept(read(weight[i]) * read(rounded(read(source[i]) * factor, like)), target, like)


@jit
def buffer_row(call, number, row, width, offset, like):
    """Returns `width` elements of row `row` of buffer `number`, from element `offset` on, as an array that shares the
    buffer's memory. `call` holds the int64 words that describe the run of the program (see Call). The buffer has the
    dtype of array `like`.
    """
    base = call[Call.BUFFERS + 2 * number]
    length = call[Call.BUFFERS + 2 * number + 1]
    return elements(base + (row * length + offset) * like.itemsize, width, like)


@jit
def copy_elements(source, target):
    """Copies array `source` to array `target`, which is at least as long. Elements may be converted from bfloat16 to
    float32, but not back. The function replaces an assignment of slices, whose check of shapes takes a second to
    compile.
    """
    for i in range(source.shape[0]):
        target[i] = copied(source[i], target)


@jit
def embed(call, fields, item, like):
    """Computes one item of the operation EMBED: copies the embedding table's rows of up to ITEM_TOKENS tokens to the
    target buffer. `item` is the item's number, from 0.

    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    width = fields[Field.WIDTH]
    ids = words(call[Call.INPUT_IDS], call[Call.NUM_TOKENS])
    for token in range(item * ITEM_TOKENS, min(call[Call.NUM_TOKENS], (item + 1) * ITEM_TOKENS)):
        source = elements(fields[Field.WEIGHT] + ids[token] * width * like.itemsize, width, like)
        target = buffer_row(call, fields[Field.TARGET], token, width, fields[Field.TARGET_OFFSET], like)
        copy_elements(source, target)


@jit
def norm(call, fields, epsilon, item, target_like, like):
    """Computes one item of the operation NORM or INPUT_NORM: RMS-normalises or copies the rows of up to ITEM_TOKENS
    tokens. `item` is the item's number, from 0. `epsilon` is added to the mean of the squares.

    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field). `like` is any array of the model's dtype (uint16 for bfloat16). `target_like` is one of the target buffer's
    dtype.
    """
    width = fields[Field.WIDTH]
    for token in range(item * ITEM_TOKENS, min(call[Call.NUM_TOKENS], (item + 1) * ITEM_TOKENS)):
        source = buffer_row(call, fields[Field.SOURCE], token, width, fields[Field.SOURCE_OFFSET], like)
        target = buffer_row(call, fields[Field.TARGET], token, width, fields[Field.TARGET_OFFSET], target_like)
        if fields[Field.NORM]:
            normalise(source, elements(fields[Field.NORM], width, like), epsilon, target, like)
        else:
            copy_elements(source, target)


@jit
def normalise_input(call, fields, epsilon, scratch, like):
    """Copies the input rows of a matrix product (LINEAR) to address `scratch`, one after the other. As the operation
    demands, it copies only the selected rows, normalises them with `epsilon`, and converts them to the dtype of the
    product's input.

    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    width, inputs = fields[Field.WIDTH], input_like(like)
    num_rows = call[Call.NUM_SELECTED] if fields[Field.SELECTED_ROWS] else call[Call.NUM_TOKENS]
    selected = words(call[Call.SELECTED], num_rows)
    is_selected = fields[Field.SELECTED_ROWS] and call[Call.SELECTED]
    for row in range(num_rows):
        token = selected[row] if is_selected else row
        source = buffer_row(call, fields[Field.SOURCE], token, width, 0, like)
        target = elements(scratch + row * width * inputs.itemsize, width, inputs)
        if fields[Field.NORM]:
            normalise(source, elements(fields[Field.NORM], width, like), epsilon, target, like)
        else:
            copy_elements(source, target)


@jit
def linear(call, fields, item, x, x_stride, num_rows, sums_address, like):
    """Computes one item of the operation LINEAR: multiplies up to ITEM_ROWS rows by one panel of the weight, and stores
    the products. `item` is the item's number, from 0.

    `x` is the address of the operation's `num_rows` input rows, which lie `x_stride` bytes apart. `sums_address` is
    that of scratch memory for the products of MAX_ROWS rows. `call` holds the int64 words that describe the run of the
    program (see Call), `fields` those of the operation (see Field). `like` is any array of the model's dtype (uint16
    for bfloat16).
    """
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
def store_gate(sums, target, like):
    """Stores silu(first half) * second half of one row's products with a panel, array `sums` [PANEL_WIDTH] float32, in
    array `target`. The results are rounded to the dtype of array `like`, even if `target` is float32.
    """
    half = target.shape[0]
    for i in range(half):
        gate = read(rounded(silu(sums[i]), like))
        target[i] = kept(gate * sums[half + i], target, like)


@jit
def _store(call, fields, store, row, panel, num_outputs, sums, like):
    """Stores one row's products with one panel in the target buffer, in the way that `store`, a Store, says. `row` and
    `panel` are indices, and `num_outputs` counts the outputs of the whole weight.

    `sums` is a float32 array with the PANEL_WIDTH products, to which the bias, if any, is added in place. `call` holds
    the int64 words that describe the run of the program (see Call), `fields` those of the operation (see Field). `like`
    is any array of the model's dtype (uint16 for bfloat16).
    """
    base = call[Call.BUFFERS + 2 * fields[Field.TARGET]]
    length = call[Call.BUFFERS + 2 * fields[Field.TARGET] + 1]
    if store == Store.GATE:
        half, inputs = PANEL_WIDTH // 2, input_like(like)
        place = row * length + panel * half
        store_gate(sums, elements(base + place * inputs.itemsize, half, inputs), like)
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
    """Returns an int32 for `bits`, the bits of a float32 as an int32. The results have the order of the numbers; both
    zeros are equal, and NaN is above all.
    """
    magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
    signed = magnitude if bits >= 0 else np.int32(-magnitude)
    return _NAN_ORDER if magnitude > _INFINITY else signed


@jit
def find_largest(bits):
    """Returns the index of the first NaN or, if there is none, of the first largest number. `bits` is an int32 array
    with the bits of float32 numbers.
    """
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
    """Computes one item of the operation LARGEST, for row `row` of the logits: writes the index of the row's largest
    logit to the array at Call.LARGEST, and whether that logit is infinite or NaN to the array at Call.NOT_FINITE.
    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field).
    """
    base = call[Call.BUFFERS + 2 * fields[Field.SOURCE]]
    length = call[Call.BUFFERS + 2 * fields[Field.SOURCE] + 1]
    bits = array_at(pointer(base + row * length * 4), (fields[Field.WIDTH],), np.int32)
    place = find_largest(bits)
    words(call[Call.LARGEST], row + 1)[row] = place
    array_at(pointer(call[Call.NOT_FINITE]), (row + 1,), np.uint8)[row] = (bits[place] & _NAN_ORDER) >= _INFINITY
