"""What a program's operations do, each cut into items that threads take as they come.

    EMBED    rows of a table                              an item: some rows
    NORM     RMS norm, or a copy                          an item: some rows
    LINEAR   (norm) ▸ product ▸ store, add, gate or logits an item: some panels of the weight, all rows
    ATTEND   (norm) ▸ rotate ▸ write KV ▸ attend           an item: one KV head of one request

Numbers are rounded to the model's dtype where the model's own layers round them: after a norm, a linear layer, a sum.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, cast

import numba
import numpy as np
from numba.extending import overload

from common.model.cpu_kernel import Kernel, exp, jit, prefetch
from common.model.fused.dot_products import MAX_ROWS, PANEL_WIDTH, panel_products
from common.model.fused.memory import pointer
from common.model.fused.numbers import read, rounded, silu


class Kind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    ATTEND = 3


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
    ITEM_PANELS = 11
    STORE = 12
    SELECTED_ROWS = 13  # whether only the rows whose logits are wanted
    LAYER = 14
    NUM_HEADS = 15
    NUM_KV_HEADS = 16
    HEAD_DIM = 17
    SHOWS_LAYER = 18


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
    BUFFERS = 25  # address and elements of a row, of each


ITEM_TOKENS = 16  # of EMBED and NORM
_TOKENS_AHEAD = 16
_LINE_BYTES = 64
_WORDS = np.int64


_array_at = cast("Kernel", numba.carray)  # type: ignore[attr-defined]


@jit
def words(address, number):  # type: ignore[no-untyped-def]
    return _array_at(pointer(address), (number,), _WORDS)


def _elements(address: int, number: int, like: Any) -> Any:
    raise NotImplementedError("in kernels only")


@overload(_elements)
def _elements_like(address, number, like):  # type: ignore[no-untyped-def]
    element = like.dtype
    return lambda address, number, like: _array_at(pointer(address), (number,), element)


elements = cast("Kernel", _elements)
"""`elements(address, number, like)`: so many elements of `like`'s dtype, there."""


@jit
def _normalise(source, weight, epsilon, target, like):  # type: ignore[no-untyped-def]
    """One row, arrays of its width."""
    total = np.float32(0)
    for i in range(source.shape[0]):
        number = read(source[i])
        total += number * number
    factor = np.float32(1) / np.sqrt(total / np.float32(source.shape[0]) + np.float32(epsilon))
    for i in range(source.shape[0]):
        target[i] = rounded(read(weight[i]) * read(rounded(read(source[i]) * factor, like)), like)


@jit
def _buffer_row(call, number, row, width, offset, like):  # type: ignore[no-untyped-def]
    base = call[Call.BUFFERS + 2 * number]
    length = call[Call.BUFFERS + 2 * number + 1]
    return elements(base + (row * length + offset) * like.itemsize, width, like)


@jit
def embed(call, fields, item, like):  # type: ignore[no-untyped-def]
    width = fields[Field.WIDTH]
    ids = words(call[Call.INPUT_IDS], call[Call.NUM_TOKENS])
    for token in range(item * ITEM_TOKENS, min(call[Call.NUM_TOKENS], (item + 1) * ITEM_TOKENS)):
        source = elements(fields[Field.WEIGHT] + ids[token] * width * like.itemsize, width, like)
        _buffer_row(call, fields[Field.TARGET], token, width, fields[Field.TARGET_OFFSET], like)[:] = source


@jit
def norm(call, fields, epsilon, item, like):  # type: ignore[no-untyped-def]
    width = fields[Field.WIDTH]
    for token in range(item * ITEM_TOKENS, min(call[Call.NUM_TOKENS], (item + 1) * ITEM_TOKENS)):
        source = _buffer_row(call, fields[Field.SOURCE], token, width, 0, like)
        target = _buffer_row(call, fields[Field.TARGET], token, width, fields[Field.TARGET_OFFSET], like)
        if fields[Field.NORM]:
            _normalise(source, elements(fields[Field.NORM], width, like), epsilon, target, like)
        else:
            target[:] = source


@jit
def normalise_input(call, fields, epsilon, scratch, like):  # type: ignore[no-untyped-def]
    """The rows that a LINEAR reads, where they are normed or selected, to `scratch`."""
    width = fields[Field.WIDTH]
    num_rows = call[Call.NUM_SELECTED] if fields[Field.SELECTED_ROWS] else call[Call.NUM_TOKENS]
    selected = words(call[Call.SELECTED], num_rows)
    is_selected = fields[Field.SELECTED_ROWS] and call[Call.SELECTED]
    for row in range(num_rows):
        token = selected[row] if is_selected else row
        source = _buffer_row(call, fields[Field.SOURCE], token, width, 0, like)
        target = elements(scratch + row * width * like.itemsize, width, like)
        if fields[Field.NORM]:
            _normalise(source, elements(fields[Field.NORM], width, like), epsilon, target, like)
        else:
            target[:] = source


@jit
def linear(call, fields, item, x, x_stride, num_rows, sums_address, like):  # type: ignore[no-untyped-def]
    """`x`: the address of the input's rows, `x_stride` bytes apart; `sums_address`: scratch for one block's sums."""
    width, num_outputs = fields[Field.WIDTH], fields[Field.NUM_OUTPUTS]
    num_steps = width * like.itemsize // 4
    panel_bytes = num_steps * PANEL_WIDTH * 4
    sums = _array_at(pointer(sums_address), (MAX_ROWS * PANEL_WIDTH,), np.float32)
    store = fields[Field.STORE]
    first = item * fields[Field.ITEM_PANELS]
    for panel in range(first, min(first + fields[Field.ITEM_PANELS], fields[Field.NUM_PANELS])):
        weight = fields[Field.WEIGHT] + panel * panel_bytes
        for start in range(0, num_rows, MAX_ROWS):
            block = min(MAX_ROWS, num_rows - start)
            panel_products(weight, x + start * x_stride, x_stride, num_steps, block, sums_address, like)
            for m in range(block):
                row = sums[m * PANEL_WIDTH : (m + 1) * PANEL_WIDTH]
                _store(call, fields, store, start + m, panel, num_outputs, row, like)


@jit
def _store(call, fields, store, row, panel, num_outputs, sums, like):  # type: ignore[no-untyped-def]
    base = call[Call.BUFFERS + 2 * fields[Field.TARGET]]
    length = call[Call.BUFFERS + 2 * fields[Field.TARGET] + 1]
    if store == Store.GATE:
        half = PANEL_WIDTH // 2
        place = row * length + panel * half
        target = elements(base + place * like.itemsize, half, like)
        for i in range(half):
            gate = read(rounded(silu(sums[i]), like))
            target[i] = rounded(gate * sums[half + i], like)
        return
    first = panel * PANEL_WIDTH
    num = min(PANEL_WIDTH, num_outputs - first)
    if fields[Field.BIAS]:
        bias = elements(fields[Field.BIAS] + first * like.itemsize, num, like)
        for i in range(num):
            sums[i] += read(bias[i])
    if store == Store.LOGITS:
        logits = _array_at(pointer(base + (row * length + first) * 4), (num,), np.float32)
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
def _rotate(source, weight, epsilon, cosines, sines, target, like):  # type: ignore[no-untyped-def]
    """One head, as float32 of what the model's dtype holds, to `target`; normed before where there is a `weight`."""
    head_dim = target.shape[0]
    half = head_dim // 2
    if weight:
        total = np.float32(0)
        for d in range(head_dim):
            total += read(source[d]) * read(source[d])
        factor = np.float32(1) / np.sqrt(total / np.float32(head_dim) + np.float32(epsilon))
        factors = elements(weight, head_dim, like)
        for d in range(head_dim):
            target[d] = read(rounded(read(factors[d]) * read(rounded(read(source[d]) * factor, like)), like))
    else:
        for d in range(head_dim):
            target[d] = read(source[d])
    for d in range(half):
        first, second = target[d], target[half + d]
        target[d] = read(rounded(first * read(cosines[d]) - second * read(sines[d]), like))
        target[half + d] = read(rounded(second * read(cosines[half + d]) + first * read(sines[half + d]), like))


@jit
def _softmax(scores):  # type: ignore[no-untyped-def]
    largest = np.float32(-np.inf)
    for t in range(scores.shape[0]):
        largest = scores[t] if scores[t] > largest else largest
    total = np.float32(0)
    for t in range(scores.shape[0]):
        weight = exp(scores[t] - largest)
        scores[t] = weight
        total += weight
    share = np.float32(1) / total
    for t in range(scores.shape[0]):
        scores[t] *= share


@jit
def attend(call, fields, epsilon, scaling, item, scratch, like):  # type: ignore[no-untyped-def]
    head_dim, num_kv_heads = fields[Field.HEAD_DIM], fields[Field.NUM_KV_HEADS]
    num_shared = fields[Field.NUM_HEADS] // num_kv_heads
    b, h = item // num_kv_heads, item % num_kv_heads
    size = like.itemsize
    starts = words(call[Call.STARTS], call[Call.NUM_ROWS] + 1)
    first, num_new = starts[b], starts[b + 1] - starts[b]
    num_tokens = words(call[Call.SEQ_LENS], call[Call.NUM_ROWS])[b]
    row = words(call[Call.REQ_POOL_INDICES], call[Call.NUM_ROWS])[b]
    slots = words(call[Call.TABLE] + row * call[Call.TABLE_WIDTH] * 8, call[Call.TABLE_WIDTH])
    positions = words(call[Call.POSITIONS], call[Call.NUM_TOKENS])
    out_cache_loc = words(call[Call.OUT_CACHE_LOC], call[Call.NUM_TOKENS])
    num_masked = words(call[Call.NUM_MASKED], call[Call.NUM_ROWS])[b]
    mask_width = call[Call.ATTENDED_WIDTH]
    attended = _array_at(pointer(call[Call.ATTENDED]), (call[Call.NUM_TOKENS] * mask_width,), np.bool_)
    token_numbers = num_kv_heads * head_dim
    plane_numbers = call[Call.NUM_SLOTS] * token_numbers
    kv = elements(call[Call.KV] + fields[Field.LAYER] * 2 * plane_numbers * size, 2 * plane_numbers, like)
    num_queries = num_new * num_shared
    queries = _array_at(pointer(scratch), (num_queries, head_dim), np.float32)
    outputs = _array_at(pointer(scratch + num_queries * head_dim * 4), (num_queries, head_dim), np.float32)
    token = _array_at(pointer(scratch + 2 * num_queries * head_dim * 4), (head_dim,), np.float32)
    scores = _array_at(
        pointer(scratch + (2 * num_queries + 1) * head_dim * 4), (num_queries, call[Call.MAX_SEQ_LEN]), np.float32
    )
    qkv_numbers = (fields[Field.NUM_HEADS] + 2 * num_kv_heads) * head_dim
    key_start = (fields[Field.NUM_HEADS] + h) * head_dim
    value_start = key_start + num_kv_heads * head_dim
    for m in range(num_new):
        qkv = _buffer_row(call, fields[Field.SOURCE], first + m, qkv_numbers, 0, like)
        angles = positions[first + m] * head_dim * size
        cosines = elements(call[Call.COSINES] + angles, head_dim, like)
        sines = elements(call[Call.SINES] + angles, head_dim, like)
        place = (out_cache_loc[first + m] * num_kv_heads + h) * head_dim
        key = qkv[key_start : key_start + head_dim]
        _rotate(key, fields[Field.KEY_NORM], epsilon, cosines, sines, token, like)
        for d in range(head_dim):
            kv[place + d] = rounded(token[d], like)
            kv[plane_numbers + place + d] = qkv[value_start + d]
        for g in range(num_shared):
            start = (h * num_shared + g) * head_dim
            query = queries[m * num_shared + g]
            _rotate(qkv[start : start + head_dim], fields[Field.NORM], epsilon, cosines, sines, query, like)
            for d in range(head_dim):
                query[d] *= np.float32(scaling)
                outputs[m * num_shared + g, d] = np.float32(0)
    num_unmasked = num_tokens - num_masked
    for t in range(num_tokens):
        place = (slots[t] * num_kv_heads + h) * head_dim
        ahead = (slots[min(t + _TOKENS_AHEAD, num_tokens - 1)] * num_kv_heads + h) * head_dim * size
        for offset in range(0, head_dim * size, _LINE_BYTES):
            prefetch(kv, ahead + offset)
        for d in range(head_dim):
            token[d] = read(kv[place + d])
        for m in range(num_new):
            if t < num_unmasked or attended[(first + m) * mask_width + t - num_unmasked]:
                for g in range(num_shared):
                    query = queries[m * num_shared + g]
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += query[d] * token[d]
                    scores[m * num_shared + g, t] = score
            else:
                for g in range(num_shared):
                    scores[m * num_shared + g, t] = -np.inf
    for q in range(num_queries):
        _softmax(scores[q, :num_tokens])
    for t in range(num_tokens):
        place = plane_numbers + (slots[t] * num_kv_heads + h) * head_dim
        ahead = (slots[min(t + _TOKENS_AHEAD, num_tokens - 1)] * num_kv_heads + h) * head_dim * size
        for offset in range(0, head_dim * size, _LINE_BYTES):
            prefetch(kv, plane_numbers * size + ahead + offset)
        for d in range(head_dim):
            token[d] = read(kv[place + d])
        for q in range(num_queries):
            weight = scores[q, t]
            if weight != 0:
                output = outputs[q]
                for d in range(head_dim):
                    output[d] += weight * token[d]
    for m in range(num_new):
        for g in range(num_shared):
            start = (h * num_shared + g) * head_dim
            target = _buffer_row(call, fields[Field.TARGET], first + m, head_dim, start, like)
            for d in range(head_dim):
                target[d] = rounded(outputs[m * num_shared + g, d], like)
