"""Attention of chunks, requests with more than MAX_QUERIES new tokens: matrix products over packed keys and values.

PREPARE_CHUNKS   an item: PANEL_WIDTH tokens of one request, for all KV heads
                 new tokens: (norm) ▸ rotate ▸ write KV to the pool; then all tokens: copy KV from the pool to panels
ATTEND_CHUNKS    an item: some new tokens of one request, for one KV head
                 (norm) ▸ rotate queries ▸ for each block of keys: scores ▸ weights ▸ sums of values

Keys and values are packed in panels of PANEL_WIDTH, for each request and KV head. T is the request's number of tokens
and D is head_dim, both rounded up to whole panels. A step is 4 bytes of a row: two bfloat16 numbers or one float32.

    keys     [T / PANEL_WIDTH, head_dim / step, PANEL_WIDTH, step]
    values   [D / PANEL_WIDTH, T / step, PANEL_WIDTH, step]

Softmax is computed in float32. Its maximum and sum are updated from block to block. Weights are rounded to the model's
dtype before they are multiplied by the values; the result is divided by the sum of the weights at the end.

`call` holds the int64 words of the forward, which `Call` names, and `fields` those of the operation, which `Field`
names. `item` is the number of an item, and `like` is an array of the model's dtype.
"""

from __future__ import annotations

import numpy as np

from baton_cpu.compiler.jit import exp, jit
from baton_cpu.compiler.memory import pointer
from baton_cpu.program.kernel.attending import rotate
from baton_cpu.program.kernel.dot_products import MAX_ROWS, PANEL_WIDTH, panel_products
from baton_cpu.program.kernel.numbers import input_like, kept, rounded
from baton_cpu.program.kernel.operations import Call, Field, array_at, buffer_row, copy_elements, elements, words

QUERY_TOKENS = 64
"""New tokens of one item, the work that a thread takes at once. They are so many that reading keys and values is a
small part of the work, and so few that threads end together.
"""
BLOCK_KEYS = 512
"""The number of keys that are read at a time. They stay in a core's second-level cache while all queries of an item
read them.
"""


def packed_tokens(num_tokens: int) -> int:
    """Returns `num_tokens` rounded up to a multiple of PANEL_WIDTH."""
    return -(-num_tokens // PANEL_WIDTH) * PANEL_WIDTH


def packed_numbers(num_packed_tokens: int, num_kv_heads: int, head_dim: int) -> int:
    """Returns how many numbers the packed keys and values of one layer take, for all KV heads together.
    `num_packed_tokens` counts the tokens of all chunks, each chunk's rounded up by `packed_tokens`.
    """
    return num_packed_tokens * num_kv_heads * (head_dim + packed_tokens(head_dim))


def scratch_bytes(num_shared: int, head_dim: int, input_itemsize: int) -> int:
    """Returns the scratch memory in bytes that one thread needs for PREPARE_CHUNKS and ATTEND_CHUNKS. `num_shared` is
    the number of query heads of each KV head, and `input_itemsize` the size in bytes of a number that matrix products
    read (see `input_dtype`).
    """
    num_queries = num_shared * QUERY_TOKENS
    width = packed_tokens(head_dim)
    floats = num_queries * (width + 2) + MAX_ROWS * (BLOCK_KEYS + PANEL_WIDTH) + head_dim
    return 4 * floats + input_itemsize * (num_queries * head_dim + MAX_ROWS * BLOCK_KEYS)


@jit
def _packed_head(call, fields, b, h, like):
    """Returns where KV head `h` of request `b` (its index in the batch) is packed: the address of its keys, the address
    of its values, and the request's number of tokens, rounded up to a multiple of PANEL_WIDTH.

    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    num_kv_heads, head_dim = fields[Field.NUM_KV_HEADS], fields[Field.HEAD_DIM]
    width = (head_dim + PANEL_WIDTH - 1) // PANEL_WIDTH * PANEL_WIDTH
    starts = words(call[Call.PACKED_STARTS], call[Call.NUM_ROWS] + 1)
    num_packed = starts[b + 1] - starts[b]
    head_bytes = num_packed * (head_dim + width) * like.itemsize
    keys = call[Call.PACKED] + starts[b] * num_kv_heads * (head_dim + width) * like.itemsize + h * head_bytes
    return keys, keys + num_packed * head_dim * like.itemsize, num_packed


@jit
def prepare_chunks(call, fields, epsilon, item, scratch, like):
    """Computes one item of the operation PREPARE_CHUNKS: PANEL_WIDTH tokens of one request. Writes the KV of the new
    ones among them to the pool, and packs the keys and values of all.

    `item` is an index into the array at Call.KEY_PARTS. `epsilon` is that of the keys' norm, and `scratch` the address
    of this thread's scratch memory (see `scratch_bytes`). `call` holds the int64 words that describe the run of the
    program (see Call), `fields` those of the operation (see Field). `like` is any array of the model's dtype (uint16
    for bfloat16).
    """
    num_kv_heads, head_dim = fields[Field.NUM_KV_HEADS], fields[Field.HEAD_DIM]
    size = like.itemsize
    step = 4 // size
    part = words(call[Call.KEY_PARTS] + item * 16, 2)
    b, begin = part[0], part[1]
    starts = words(call[Call.STARTS], call[Call.NUM_ROWS] + 1)
    num_tokens = words(call[Call.SEQ_LENS], call[Call.NUM_ROWS])[b]
    prefix = num_tokens - (starts[b + 1] - starts[b])
    stop = min(begin + PANEL_WIDTH, num_tokens)
    row = words(call[Call.REQ_POOL_INDICES], call[Call.NUM_ROWS])[b]
    slots = words(call[Call.TABLE] + row * call[Call.TABLE_WIDTH] * 8, call[Call.TABLE_WIDTH])
    positions = words(call[Call.POSITIONS], call[Call.NUM_TOKENS])
    out_cache_loc = words(call[Call.OUT_CACHE_LOC], call[Call.NUM_TOKENS])
    plane_bytes = call[Call.NUM_SLOTS] * num_kv_heads * head_dim * size
    keys = call[Call.KV] + fields[Field.LAYER] * 2 * plane_bytes
    values = keys + plane_bytes
    token = array_at(pointer(scratch), (head_dim,), np.float32)
    qkv_numbers = (fields[Field.NUM_HEADS] + 2 * num_kv_heads) * head_dim
    for t in range(max(begin, prefix), stop):
        m = starts[b] + t - prefix
        qkv = buffer_row(call, fields[Field.SOURCE], m, qkv_numbers, 0, like)
        angles = positions[m] * head_dim * size
        cosines = elements(call[Call.COSINES] + angles, head_dim, like)
        sines = elements(call[Call.SINES] + angles, head_dim, like)
        for h in range(num_kv_heads):
            place = (out_cache_loc[m] * num_kv_heads + h) * head_dim * size
            pool_key, pool_value = elements(keys + place, head_dim, like), elements(values + place, head_dim, like)
            start = (fields[Field.NUM_HEADS] + h) * head_dim
            rotate(qkv[start : start + head_dim], fields[Field.KEY_NORM], epsilon, cosines, sines, token, like)
            for d in range(head_dim):
                pool_key[d] = rounded(token[d], like)
            start += num_kv_heads * head_dim
            copy_elements(qkv[start : start + head_dim], pool_value)
    num_value_panels = (head_dim + PANEL_WIDTH - 1) // PANEL_WIDTH
    for h in range(num_kv_heads):
        to_keys, to_values, num_packed = _packed_head(call, fields, b, h, like)
        panel = elements(to_keys + begin * head_dim * size, PANEL_WIDTH * head_dim, like)
        for t in range(begin, begin + PANEL_WIDTH):
            j = t - begin
            place = (slots[min(t, num_tokens - 1)] * num_kv_heads + h) * head_dim * size
            key, value = elements(keys + place, head_dim, like), elements(values + place, head_dim, like)
            in_step = (t // step) * PANEL_WIDTH * step + t % step
            if t < stop:
                for d in range(0, head_dim, step):
                    for e in range(step):
                        panel[(d * PANEL_WIDTH) + j * step + e] = key[d + e]
            else:  # zeros, which weights of 0 leave 0; other memory might be NaN
                for d in range(0, head_dim, step):
                    for e in range(step):
                        panel[(d * PANEL_WIDTH) + j * step + e] = 0
            for p in range(num_value_panels):
                first = p * PANEL_WIDTH
                address = to_values + (p * num_packed * PANEL_WIDTH + in_step) * size
                target = elements(address, PANEL_WIDTH * step, like)
                num = min(PANEL_WIDTH, head_dim - first) if t < stop else 0
                for d in range(num):
                    target[d * step] = value[first + d]
                for d in range(num, PANEL_WIDTH):
                    target[d * step] = 0


@jit
def _mask(scores, num_panels, num_visible):
    """Sets a query's scores from key `num_visible` of the block on to -inf. The scores lie in `num_panels` panels of
    PANEL_WIDTH keys, each of which has room for the scores of MAX_ROWS queries; array `scores` begins with this query's
    first score.
    """
    for p in range(num_visible // PANEL_WIDTH, num_panels):
        first = p * MAX_ROWS * PANEL_WIDTH
        for i in range(max(0, num_visible - p * PANEL_WIDTH), PANEL_WIDTH):
            scores[first + i] = -np.inf


@jit
def _highest(scores, num_panels, lanes):
    """Returns a query's highest score, ignoring NaN. The scores lie in `num_panels` panels of PANEL_WIDTH keys, each of
    which has room for the scores of MAX_ROWS queries; array `scores` begins with this query's first score.

    `lanes` [PANEL_WIDTH] is scratch memory: each lane keeps a maximum of its own, because the compiler cannot turn a
    single running maximum into vector code.
    """
    for i in range(PANEL_WIDTH):
        lanes[i] = -np.inf
    for p in range(num_panels):
        panel = scores[p * MAX_ROWS * PANEL_WIDTH : p * MAX_ROWS * PANEL_WIDTH + PANEL_WIDTH]
        for i in range(PANEL_WIDTH):
            lanes[i] = panel[i] if panel[i] > lanes[i] else lanes[i]
    highest = np.float32(-np.inf)
    for i in range(PANEL_WIDTH):
        highest = lanes[i] if lanes[i] > highest else highest
    return highest


@jit
def _weigh(scores, num_panels, highest, scaling, weights, like):
    """Turns a query's scores into softmax weights, exp((score - `highest`) * `scaling`), not yet divided by their sum.
    Writes them to array `weights` [keys], rounded to the model's dtype. Returns their sum before rounding.

    The scores lie in `num_panels` panels of PANEL_WIDTH keys, each of which has room for the scores of MAX_ROWS
    queries; array `scores` begins with this query's first score. `like` is any array of the model's dtype (uint16 for
    bfloat16).
    """
    total = np.float32(0)
    for p in range(num_panels):
        panel = scores[p * MAX_ROWS * PANEL_WIDTH : p * MAX_ROWS * PANEL_WIDTH + PANEL_WIDTH]
        target = weights[p * PANEL_WIDTH : (p + 1) * PANEL_WIDTH]
        for i in range(PANEL_WIDTH):
            weight = exp((panel[i] - highest) * scaling)
            target[i] = kept(weight, target, like)
            total += weight
    return total


@jit
def attend_chunks(call, fields, epsilon, scaling, item, scratch, like):
    """Computes one item of the operation ATTEND_CHUNKS: attention of up to QUERY_TOKENS new tokens of one request, for
    the query heads of one KV head.

    `item` is the item's number, from 0: one for each entry at Call.QUERY_PARTS and KV head. `epsilon` is that of the
    queries' norm, `scaling` multiplies the scores, and `scratch` is the address of this thread's scratch memory (see
    `scratch_bytes`). `call` holds the int64 words that describe the run of the program (see Call), `fields` those of
    the operation (see Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    num_kv_heads, head_dim = fields[Field.NUM_KV_HEADS], fields[Field.HEAD_DIM]
    num_shared = fields[Field.NUM_HEADS] // num_kv_heads
    size, inputs = like.itemsize, input_like(like)
    scale = np.float32(scaling)
    part, h = words(call[Call.QUERY_PARTS] + item // num_kv_heads * 16, 2), item % num_kv_heads
    b, begin = part[0], part[1]
    starts = words(call[Call.STARTS], call[Call.NUM_ROWS] + 1)
    first, num_new = starts[b] + begin, starts[b + 1] - starts[b]
    num_queries = min(QUERY_TOKENS, num_new - begin)
    num_before = words(call[Call.SEQ_LENS], call[Call.NUM_ROWS])[b] - num_new + begin
    keys, values, num_packed = _packed_head(call, fields, b, h, like)
    num_value_panels = (head_dim + PANEL_WIDTH - 1) // PANEL_WIDTH
    width = num_value_panels * PANEL_WIDTH
    num_rows = num_shared * num_queries
    products_address = scratch
    scores_address = products_address + MAX_ROWS * PANEL_WIDTH * 4
    outputs_address = scores_address + MAX_ROWS * BLOCK_KEYS * 4
    highest_address = outputs_address + num_rows * width * 4
    queries_address = highest_address + 2 * num_rows * 4 + head_dim * 4
    weights_address = queries_address + num_rows * head_dim * inputs.itemsize
    products = array_at(pointer(products_address), (MAX_ROWS * PANEL_WIDTH,), np.float32)
    scores = array_at(pointer(scores_address), (MAX_ROWS * BLOCK_KEYS,), np.float32)
    outputs = array_at(pointer(outputs_address), (num_rows, width), np.float32)
    highest = array_at(pointer(highest_address), (num_rows,), np.float32)
    totals = array_at(pointer(highest_address + num_rows * 4), (num_rows,), np.float32)
    token = array_at(pointer(highest_address + 2 * num_rows * 4), (head_dim,), np.float32)
    queries = elements(queries_address, num_rows * head_dim, inputs)
    weights = elements(weights_address, MAX_ROWS * BLOCK_KEYS, inputs)
    positions = words(call[Call.POSITIONS], call[Call.NUM_TOKENS])
    for m in range(num_queries):
        angles = positions[first + m] * head_dim * size
        cosines = elements(call[Call.COSINES] + angles, head_dim, like)
        sines = elements(call[Call.SINES] + angles, head_dim, like)
        for g in range(num_shared):
            start = (h * num_shared + g) * head_dim
            query = buffer_row(call, fields[Field.SOURCE], first + m, head_dim, start, like)
            rotate(query, fields[Field.NORM], epsilon, cosines, sines, token, like)
            q = g * num_queries + m
            target = queries[q * head_dim : (q + 1) * head_dim]
            for d in range(head_dim):
                target[d] = kept(token[d], target, like)
            outputs[q, :] = 0
            highest[q] = -np.inf
            totals[q] = 0
    for block in range(0, num_before + num_queries, BLOCK_KEYS):
        for start in range(0, num_rows, MAX_ROWS):  # a block may have rows of several query heads
            num_block_rows = min(MAX_ROWS, num_rows - start)
            num_keys = 0
            for r in range(num_block_rows):
                num_keys = max(num_keys, num_before + (start + r) % num_queries + 1 - block)
            num_panels = (min(num_keys, BLOCK_KEYS) + PANEL_WIDTH - 1) // PANEL_WIDTH
            if num_keys <= 0:
                continue
            x, x_stride = queries_address + start * head_dim * inputs.itemsize, head_dim * inputs.itemsize
            for p in range(num_panels):
                panel = keys + (block + p * PANEL_WIDTH) * head_dim * size
                out = scores_address + p * MAX_ROWS * PANEL_WIDTH * 4
                panel_products(panel, x, x_stride, head_dim * size // 4, num_block_rows, out, like)
            for r in range(num_block_rows):
                q = start + r
                num_visible = num_before + q % num_queries + 1 - block
                row = scores[r * PANEL_WIDTH :]
                row_weights = weights[r * BLOCK_KEYS : (r + 1) * BLOCK_KEYS]
                if num_visible <= 0:
                    row_weights[: num_panels * PANEL_WIDTH] = 0
                    continue
                _mask(row, num_panels, num_visible)
                seen = _highest(row, num_panels, products)
                if seen > highest[q]:
                    decay = exp((highest[q] - seen) * scale)
                    highest[q] = seen
                    totals[q] *= decay
                    for d in range(width):
                        outputs[q, d] *= decay
                totals[q] += _weigh(row, num_panels, highest[q], scale, row_weights, like)
            num_steps, stride = num_panels * PANEL_WIDTH * size // 4, BLOCK_KEYS * inputs.itemsize
            for p in range(num_value_panels):
                panel = values + (p * num_packed + block) * PANEL_WIDTH * size
                panel_products(panel, weights_address, stride, num_steps, num_block_rows, products_address, like)
                for r in range(num_block_rows):
                    output = outputs[start + r, p * PANEL_WIDTH : (p + 1) * PANEL_WIDTH]
                    sums = products[r * PANEL_WIDTH : (r + 1) * PANEL_WIDTH]
                    for d in range(PANEL_WIDTH):
                        output[d] += sums[d]
    for q in range(num_rows):
        start = (h * num_shared + q // num_queries) * head_dim
        target = buffer_row(call, fields[Field.TARGET], first + q % num_queries, head_dim, start, inputs)
        share = np.float32(1) / totals[q]
        for d in range(head_dim):
            target[d] = kept(outputs[q, d] * share, target, like)
