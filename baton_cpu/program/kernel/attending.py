"""Attention of requests with few new tokens: rotate queries and keys, write the new KV to the pool, attend over the
request's slots.

A request's tokens are divided into parts of PART_TOKENS. Each part has scores, weights and sums of values as if there
were no other part, and the parts' results are joined in order. An item is a group of parts, so that threads can share
even a single request. The thread that ends a request's last group joins its parts. The result depends neither on the
number of groups nor on the thread that joins them.

`call` holds the int64 words of the forward, which `Call` names, and `fields` those of the operation, which `Field`
names. `like` is an array of the model's dtype.
"""

from __future__ import annotations

import numpy as np

from baton_cpu.attention import MAX_QUERIES, NUM_LANES, largest
from baton_cpu.compiler.jit import exp, jit
from baton_cpu.compiler.memory import add_to_word, pointer, store_word
from baton_cpu.compiler.numbers import read
from baton_cpu.compiler.vectors import fused_multiply_add
from baton_cpu.program.kernel.attention_products import TOKENS_AHEAD, ask_for_tokens, make_scores, sum_values
from baton_cpu.program.kernel.numbers import input_like, kept, rounded
from baton_cpu.program.kernel.operations import Call, Field, array_at, buffer_row, elements, words

PART_TOKENS = 64


def part_bytes(num_queries: int, head_dim: int) -> int:
    """Returns the size in bytes of the attention result of one part of a request's tokens, for `num_queries` queries:
    their sums of values, then their highest scores, then their sums of weights. A query is one head of one new token.
    """
    return 4 * num_queries * (head_dim + 2)


def scratch_bytes(num_queries: int, num_of_head: int, head_dim: int) -> int:
    """Returns the scratch memory in bytes that one thread needs for ATTEND. A query is one head of one new token.
    `num_queries` is the largest number of queries of a request, and `num_of_head` how many of these read one KV head.
    """
    return 2 * part_bytes(num_queries, head_dim) + 4 * (
        (num_queries + 1) * head_dim + num_of_head * PART_TOKENS + NUM_LANES
    )


@jit
def rotate(source, weight, epsilon, cosines, sines, target, like):
    """Applies rotary embedding to one head, array `source`, and writes it to array `target` [head_dim] float32, rounded
    to the dtype of array `like`. `cosines` and `sines` are arrays [head_dim] for the token's position.

    `weight` is the address of a norm's weight: the head is RMS-normalised first, with `epsilon`. 0 means no norm.
    """
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
def _angles(call, token, head_dim, like):
    """Returns the cosines and sines for a token's position, two arrays [head_dim]. `token` is the token's index in the
    forward. `call` holds the int64 words that describe the run of the program (see Call). `like` is any array of the
    model's dtype (uint16 for bfloat16).
    """
    place = words(call[Call.POSITIONS], call[Call.NUM_TOKENS])[token] * head_dim * like.itemsize
    return elements(call[Call.COSINES] + place, head_dim, like), elements(call[Call.SINES] + place, head_dim, like)


@jit
def _qkv(call, fields, token, like):
    """Returns a token's query heads, key heads and value heads, one after the other, as one array. `token` is the
    token's index in the forward. `call` holds the int64 words that describe the run of the program (see Call), `fields`
    those of the operation (see Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    numbers = (fields[Field.NUM_HEADS] + 2 * fields[Field.NUM_KV_HEADS]) * fields[Field.HEAD_DIM]
    return buffer_row(call, fields[Field.SOURCE], token, numbers, 0, like)


@jit
def _rotate_queries(call, fields, epsilon, scaling, first, num_new, queries, like):
    """Normalises (if there is a norm, with `epsilon`) and rotates a request's queries, and multiplies them by
    `scaling`. Writes them to address `queries`: [KV heads, new tokens, query heads of each, head_dim] float32.

    `first` is the index of the request's first new token in the forward, and `num_new` the number of its new tokens.
    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    num_kv_heads, head_dim = fields[Field.NUM_KV_HEADS], fields[Field.HEAD_DIM]
    num_shared = fields[Field.NUM_HEADS] // num_kv_heads
    for m in range(num_new):
        qkv = _qkv(call, fields, first + m, like)
        cosines, sines = _angles(call, first + m, head_dim, like)
        for h in range(num_kv_heads):
            for g in range(num_shared):
                place = ((h * num_new + m) * num_shared + g) * head_dim
                query = array_at(pointer(queries + place * 4), (head_dim,), np.float32)
                head = qkv[(h * num_shared + g) * head_dim : (h * num_shared + g + 1) * head_dim]
                rotate(head, fields[Field.NORM], epsilon, cosines, sines, query, like)
                for d in range(head_dim):
                    query[d] *= np.float32(scaling)


@jit
def _write_kv(call, fields, epsilon, token, keys, values, scratch, like):
    """Normalises (if there is a norm, with `epsilon`) and rotates a new token's keys, and writes its keys and values to
    its slot. `token` is the token's index in the forward.

    `keys` and `values` are the addresses of the layer's keys and values in the pool. `scratch` is the address of
    head_dim float32. `call` holds the int64 words that describe the run of the program (see Call), `fields` those of
    the operation (see Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    num_kv_heads, head_dim = fields[Field.NUM_KV_HEADS], fields[Field.HEAD_DIM]
    qkv = _qkv(call, fields, token, like)
    cosines, sines = _angles(call, token, head_dim, like)
    slot = words(call[Call.OUT_CACHE_LOC], call[Call.NUM_TOKENS])[token]
    rotated = array_at(pointer(scratch), (head_dim,), np.float32)
    for h in range(num_kv_heads):
        place = (slot * num_kv_heads + h) * head_dim * like.itemsize
        pool_key, pool_value = elements(keys + place, head_dim, like), elements(values + place, head_dim, like)
        start = (fields[Field.NUM_HEADS] + h) * head_dim
        key = qkv[start : start + head_dim]
        value = qkv[start + num_kv_heads * head_dim : start + (num_kv_heads + 1) * head_dim]
        rotate(key, fields[Field.KEY_NORM], epsilon, cosines, sines, rotated, like)
        for d in range(head_dim):
            pool_key[d] = rounded(rotated[d], like)
            pool_value[d] = value[d]


@jit
def _mask(call, first, num_new, num_shared, begin, num_unmasked, num_tokens, scores):
    """Sets to -inf the scores of tokens that a query does not attend, in one part of a request's tokens. Returns
    whether any score was set. The part has `num_tokens` tokens, from the request's token `begin` on. All queries attend
    the request's first `num_unmasked` tokens.

    `scores` is an array [num_new * num_shared, PART_TOKENS] for the `num_shared` query heads of one KV head. `first` is
    the index of the request's first new token in the forward, and `num_new` the number of its new tokens. `call` holds
    the int64 words that describe the run of the program (see Call).
    """
    width = call[Call.ATTENDED_WIDTH]
    attended = array_at(pointer(call[Call.ATTENDED]), (call[Call.NUM_TOKENS] * width,), np.bool_)
    masks = False
    for m in range(num_new):
        for t in range(max(np.int64(0), num_unmasked - begin), num_tokens):
            if not attended[(first + m) * width + begin + t - num_unmasked]:
                masks = True
                for g in range(num_shared):
                    scores[m * num_shared + g, t] = -np.inf
    return masks


@jit
def _weigh(scores, num_tokens, lanes):
    """Turns one query's scores into softmax weights, in place and not yet divided by their sum. Returns the highest
    score and the sum of the weights, or -inf and 0 if the query attends none of the tokens.

    `scores` is an array [PART_TOKENS], of which the first `num_tokens` are filled; the other weights become 0. `lanes`
    [NUM_LANES] is scratch memory.
    """
    for t in range(num_tokens, PART_TOKENS):
        scores[t] = -np.inf
    highest = largest(scores, PART_TOKENS, lanes)
    shift = highest if highest > -np.inf else np.float32(0)
    total = np.float32(0)
    for t in range(PART_TOKENS):
        weight = exp(scores[t] - shift)
        scores[t] = weight
        total += weight
    return highest, total


@jit
def _sum_attended(plane, token_bytes, slots, begin, end, weights, sums, like):
    """Adds to `sums` the values of tokens `begin` .. `end` - 1, multiplied by each query's weights. It is for tokens
    that only some queries attend: where a query's weight is 0, it does not read the value.

    `plane` is the address of slot 0's value of one KV head, slots lie `token_bytes` apart, and `slots` is the address
    of the tokens' slots (int64). Arrays, float32: weights [queries, tokens], sums [queries, head_dim]. `like` is any
    array of the model's dtype (uint16 for bfloat16).
    """
    places = words(slots, end)
    for t in range(begin, end):
        value = elements(plane + places[t] * token_bytes, sums.shape[1], like)
        for q in range(sums.shape[0]):
            weight = weights[q, t]
            if weight != 0:
                for d in range(sums.shape[1]):
                    sums[q, d] += weight * read(value[d])


@jit
def _join(joined, part, num_queries, head_dim):
    """Merges the attention result of one part of a request's tokens, at address `part`, into the result of the parts
    before it, at address `joined`. Both have the layout that `part_bytes` describes. Multiply-adds are explicitly
    fused, so every call rounds alike, however the compiler optimises it.
    """
    own = array_at(pointer(part), (num_queries * (head_dim + 2),), np.float32)
    all_ = array_at(pointer(joined), (num_queries * (head_dim + 2),), np.float32)
    highest, total = num_queries * head_dim, num_queries * (head_dim + 1)
    for q in range(num_queries):
        before, new = np.float32(1), np.float32(1)
        if own[highest + q] > all_[highest + q]:
            before, new = exp(all_[highest + q] - own[highest + q]), np.float32(1)
            all_[highest + q] = own[highest + q]
        elif own[highest + q] > -np.inf:
            new = exp(own[highest + q] - all_[highest + q])
        all_[total + q] = fused_multiply_add(own[total + q], new, before * all_[total + q])
        for d in range(q * head_dim, (q + 1) * head_dim):
            all_[d] = fused_multiply_add(own[d], new, before * all_[d])


@jit
def _attend_part(
    call, fields, b, first, num_new, begin, num_own, num_near, keys, values, slots, queries, part, weights_at, like
):
    """Computes attention of request `b` (its index in the batch) over one part of its tokens, `num_own` from `begin`
    on, as if there were no others. Writes the result to address `part`, in the layout that `part_bytes` describes.
    Meanwhile it prefetches tokens after the part, but none beyond the end of the item, `num_near` tokens after `begin`.

    `first` is the index of the request's first new token in the forward, and `num_new` the number of its new tokens.
    `keys` and `values` are the addresses of the layer's keys and values in the pool. `slots` is the address of the
    slots of the tokens from `begin` on, `queries` that of the rotated queries, and `weights_at` that of scratch memory.
    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    num_kv_heads, head_dim = fields[Field.NUM_KV_HEADS], fields[Field.HEAD_DIM]
    num_queries = num_new * fields[Field.NUM_HEADS]
    num_shared = fields[Field.NUM_HEADS] // num_kv_heads
    num_of_head = num_new * num_shared
    token_bytes = num_kv_heads * head_dim * like.itemsize
    num_unmasked = _num_unmasked(call, b)
    stride = np.int64(PART_TOKENS)
    weights = array_at(pointer(weights_at), (num_of_head, PART_TOKENS), np.float32)
    lanes = array_at(pointer(weights_at + 4 * num_of_head * PART_TOKENS), (NUM_LANES,), np.float32)
    highest = array_at(pointer(part + 4 * num_queries * head_dim), (2, num_queries), np.float32)
    for h in range(num_kv_heads):
        plane, wanted = h * head_dim * like.itemsize, queries + 4 * h * num_of_head * head_dim
        make_scores(
            keys + plane, token_bytes, slots, num_own, num_near, wanted, head_dim, num_of_head, weights_at, stride, like
        )
        num_free = num_own
        if begin + num_own > num_unmasked:
            masks = _mask(call, first, num_new, num_shared, begin, num_unmasked, num_own, weights)
            num_free = max(np.int64(0), num_unmasked - begin) if masks else num_own
        for q in range(num_of_head):
            most, total = _weigh(weights[q], num_own, lanes)
            highest[0, h * num_of_head + q] = most
            highest[1, h * num_of_head + q] = total
        sums_at = part + 4 * h * num_of_head * head_dim
        sums = array_at(pointer(sums_at), (num_of_head, head_dim), np.float32)
        if num_free:
            sum_values(
                values + plane,
                token_bytes,
                slots,
                num_free,
                num_near,
                weights_at,
                stride,
                num_of_head,
                sums_at,
                head_dim,
                like,
            )
        else:
            sums[:] = 0
        _sum_attended(values + plane, token_bytes, slots, num_free, num_own, weights, sums, like)


@jit
def _few_tokens_before(starts, b):
    """Returns how many new tokens the requests before `b` (an index in the batch) have, leaving out requests with more
    than MAX_QUERIES, which are computed as chunks. The results of these tokens are stored before those of request `b`.
    Array `starts` [B + 1] has the index of each request's first new token in the forward.
    """
    total = np.int64(0)
    for other in range(b):
        num_new = starts[other + 1] - starts[other]
        total += num_new if num_new <= MAX_QUERIES else np.int64(0)
    return total


@jit
def _num_unmasked(call, b):
    """Returns how many of the tokens of request `b` (its index in the batch), from the first on, are attended by all
    its queries. `call` holds the int64 words that describe the run of the program (see Call).
    """
    num_rows = call[Call.NUM_ROWS]
    return words(call[Call.SEQ_LENS], num_rows)[b] - words(call[Call.NUM_MASKED], num_rows)[b]


@jit
def attend(call, fields, epsilon, scaling, item, scratch, like):
    """Computes one item of the operation ATTEND: attention of one request over a group of parts of its tokens,
    including the writing of new keys and values to the pool. Does nothing for a request with more than MAX_QUERIES new
    tokens, which attends as a chunk.

    `item` is the item's number, from 0. `epsilon` is that of the norms of queries and keys, `scaling` multiplies the
    scores, and `scratch` is the address of this thread's scratch memory (see `scratch_bytes`). `call` holds the int64
    words that describe the run of the program (see Call), `fields` those of the operation (see Field). `like` is any
    array of the model's dtype (uint16 for bfloat16).
    """
    num_groups = call[Call.NUM_GROUPS]
    b, group = item // num_groups, item % num_groups
    starts = words(call[Call.STARTS], call[Call.NUM_ROWS] + 1)
    first, num_new = starts[b], starts[b + 1] - starts[b]
    if num_new > MAX_QUERIES:
        return
    num_heads, head_dim = fields[Field.NUM_HEADS], fields[Field.HEAD_DIM]
    num_queries = num_new * num_heads
    size = 4 * num_queries * (head_dim + 2)
    joined, parts, queries = scratch, scratch + size, scratch + 2 * size
    rotated = queries + 4 * num_queries * head_dim
    weights = rotated + 4 * head_dim

    num_tokens = words(call[Call.SEQ_LENS], call[Call.NUM_ROWS])[b]
    row = words(call[Call.REQ_POOL_INDICES], call[Call.NUM_ROWS])[b]
    slots = call[Call.TABLE] + row * call[Call.TABLE_WIDTH] * 8
    token_bytes = fields[Field.NUM_KV_HEADS] * head_dim * like.itemsize
    keys = call[Call.KV] + fields[Field.LAYER] * 2 * call[Call.NUM_SLOTS] * token_bytes
    values = keys + call[Call.NUM_SLOTS] * token_bytes

    num_parts = (num_tokens + PART_TOKENS - 1) // PART_TOKENS
    begin_part, end_part = num_parts * group // num_groups, num_parts * (group + 1) // num_groups
    is_shared = num_groups > 1
    if is_shared:
        max_parts = (call[Call.MAX_SEQ_LEN] + PART_TOKENS - 1) // PART_TOKENS
        parts = call[Call.PARTS] + _few_tokens_before(starts, b) * num_heads * (head_dim + 2) * 4 * max_parts
    else:
        _clear(joined, num_queries, head_dim)
    end = min(num_tokens, end_part * PART_TOKENS)
    if begin_part < end_part:
        begin = begin_part * PART_TOKENS
        for plane in (keys, values):
            ask_for_tokens(plane, token_bytes, slots + begin * 8, min(end - begin, TOKENS_AHEAD))
        _rotate_queries(call, fields, epsilon, scaling, first, num_new, queries, like)
    for number in range(begin_part, end_part):
        begin = number * PART_TOKENS
        num_own = min(num_tokens - begin, PART_TOKENS)
        prefix = num_tokens - num_new
        for t in range(max(begin, prefix), begin + num_own):
            _write_kv(call, fields, epsilon, first + t - prefix, keys, values, rotated, like)
        part = parts + number * size if is_shared else parts
        _attend_part(
            call,
            fields,
            b,
            first,
            num_new,
            begin,
            num_own,
            end - begin,
            keys,
            values,
            slots + begin * 8,
            queries,
            part,
            weights,
            like,
        )
        if not is_shared:
            _join(joined, part, num_queries, head_dim)
    if is_shared:
        ended = call[Call.GROUPS_ENDED] + b * 8
        if add_to_word(ended, 1) != num_groups - 1:
            return
        store_word(ended, 0)
        _clear(joined, num_queries, head_dim)
        for number in range(num_parts):
            _join(joined, parts + number * size, num_queries, head_dim)
    _give_out(call, fields, first, num_new, joined, like)


@jit
def _clear(joined, num_queries, head_dim):
    """Sets the memory at address `joined` to the attention result over no tokens, in the layout that `part_bytes`
    describes: sums of 0, and highest scores of -inf.
    """
    numbers = array_at(pointer(joined), (num_queries * (head_dim + 2),), np.float32)
    numbers[:] = 0
    numbers[num_queries * head_dim : num_queries * (head_dim + 1)] = -np.inf


@jit
def _give_out(call, fields, first, num_new, joined, like):
    """Divides each query's sum of values by its sum of weights, and writes the result to the target buffer. The sums of
    one request are at address `joined`, in the layout that `part_bytes` describes.

    `first` is the index of the request's first new token in the forward, and `num_new` the number of its new tokens.
    `call` holds the int64 words that describe the run of the program (see Call), `fields` those of the operation (see
    Field). `like` is any array of the model's dtype (uint16 for bfloat16).
    """
    num_heads, head_dim = fields[Field.NUM_HEADS], fields[Field.HEAD_DIM]
    num_shared = num_heads // fields[Field.NUM_KV_HEADS]
    num_queries, inputs = num_new * num_heads, input_like(like)
    totals = array_at(pointer(joined + 4 * num_queries * (head_dim + 1)), (num_queries,), np.float32)
    for q in range(num_queries):
        h, m, g = q // (num_new * num_shared), q // num_shared % num_new, q % num_shared
        sums = array_at(pointer(joined + 4 * q * head_dim), (head_dim,), np.float32)
        share = np.float32(1) / totals[q]
        target = buffer_row(call, fields[Field.TARGET], first + m, head_dim, (h * num_shared + g) * head_dim, inputs)
        for d in range(head_dim):
            target[d] = kept(sums[d] * share, target, like)
