"""Attention of one KV head of one request: rotate, write the new tokens' KV to the pool, attend over its slots."""

from __future__ import annotations

import numpy as np

from common.model.attention_cpu import MAX_QUERIES, NUM_LANES, largest
from common.model.cpu_kernel import Kernel, exp, jit, prefetch
from common.model.fused.memory import pointer
from common.model.fused.numbers import read, rounded
from common.model.fused.operations import Call, Field, array_at, buffer_row, elements, words

_TOKENS_AHEAD = 16
_LINE_BYTES = 64


@jit
def rotate(source, weight, epsilon, cosines, sines, target, like):  # type: ignore[no-untyped-def]
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
def _softmax(scores, lanes):  # type: ignore[no-untyped-def]
    highest = largest(scores, scores.shape[0], lanes)
    total = np.float32(0)
    for t in range(scores.shape[0]):
        weight = exp(scores[t] - highest)
        scores[t] = weight
        total += weight
    share = np.float32(1) / total
    for t in range(scores.shape[0]):
        scores[t] *= share


def _attend_of(made_for: int | None) -> Kernel:
    """`made_for`: a head_dim, so that loops over a head become vector code without remainders; None: any."""

    @jit
    def attend(call, fields, epsilon, scaling, item, scratch, like):  # type: ignore[no-untyped-def]
        num_kv_heads = fields[Field.NUM_KV_HEADS]
        head_dim = fields[Field.HEAD_DIM] if made_for is None else made_for
        num_shared = fields[Field.NUM_HEADS] // num_kv_heads
        b, h = item // num_kv_heads, item % num_kv_heads
        size = like.itemsize
        starts = words(call[Call.STARTS], call[Call.NUM_ROWS] + 1)
        first, num_new = starts[b], starts[b + 1] - starts[b]
        if num_new > MAX_QUERIES:
            return
        num_tokens = words(call[Call.SEQ_LENS], call[Call.NUM_ROWS])[b]
        row = words(call[Call.REQ_POOL_INDICES], call[Call.NUM_ROWS])[b]
        slots = words(call[Call.TABLE] + row * call[Call.TABLE_WIDTH] * 8, call[Call.TABLE_WIDTH])
        positions = words(call[Call.POSITIONS], call[Call.NUM_TOKENS])
        out_cache_loc = words(call[Call.OUT_CACHE_LOC], call[Call.NUM_TOKENS])
        num_masked = words(call[Call.NUM_MASKED], call[Call.NUM_ROWS])[b]
        mask_width = call[Call.ATTENDED_WIDTH]
        attended = array_at(pointer(call[Call.ATTENDED]), (call[Call.NUM_TOKENS] * mask_width,), np.bool_)
        token_numbers = num_kv_heads * head_dim
        plane_numbers = call[Call.NUM_SLOTS] * token_numbers
        keys = call[Call.KV] + fields[Field.LAYER] * 2 * plane_numbers * size
        values = keys + plane_numbers * size
        plane = elements(keys, 2 * plane_numbers, like)
        num_queries = num_new * num_shared
        queries = array_at(pointer(scratch), (num_queries, head_dim), np.float32)
        outputs = array_at(pointer(scratch + num_queries * head_dim * 4), (num_queries, head_dim), np.float32)
        token = array_at(pointer(scratch + 2 * num_queries * head_dim * 4), (head_dim,), np.float32)
        after_token = scratch + (2 * num_queries + 1) * head_dim * 4
        lanes = array_at(pointer(after_token), (NUM_LANES,), np.float32)
        scores = array_at(pointer(after_token + NUM_LANES * 4), (num_queries, call[Call.MAX_SEQ_LEN]), np.float32)
        qkv_numbers = (fields[Field.NUM_HEADS] + 2 * num_kv_heads) * head_dim
        key_start = (fields[Field.NUM_HEADS] + h) * head_dim
        value_start = key_start + num_kv_heads * head_dim
        for m in range(num_new):
            qkv = buffer_row(call, fields[Field.SOURCE], first + m, qkv_numbers, 0, like)
            angles = positions[first + m] * head_dim * size
            cosines = elements(call[Call.COSINES] + angles, head_dim, like)
            sines = elements(call[Call.SINES] + angles, head_dim, like)
            place = (out_cache_loc[first + m] * num_kv_heads + h) * head_dim
            key, value = qkv[key_start : key_start + head_dim], qkv[value_start : value_start + head_dim]
            pool_key = elements(keys + place * size, head_dim, like)
            pool_value = elements(values + place * size, head_dim, like)
            rotate(key, fields[Field.KEY_NORM], epsilon, cosines, sines, token, like)
            for d in range(head_dim):
                pool_key[d] = rounded(token[d], like)
                pool_value[d] = value[d]
            for g in range(num_shared):
                start = (h * num_shared + g) * head_dim
                query = queries[m * num_shared + g]
                rotate(qkv[start : start + head_dim], fields[Field.NORM], epsilon, cosines, sines, query, like)
                for d in range(head_dim):
                    query[d] *= np.float32(scaling)
                    outputs[m * num_shared + g, d] = np.float32(0)
        num_unmasked = num_tokens - num_masked
        for t in range(num_tokens):
            place = (slots[t] * num_kv_heads + h) * head_dim
            ahead = (slots[min(t + _TOKENS_AHEAD, num_tokens - 1)] * num_kv_heads + h) * head_dim * size
            for offset in range(0, head_dim * size, _LINE_BYTES):
                prefetch(plane, ahead + offset)
            key = elements(keys + place * size, head_dim, like)
            for d in range(head_dim):
                token[d] = read(key[d])
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
            _softmax(scores[q, :num_tokens], lanes)
        for t in range(num_tokens):
            place = (slots[t] * num_kv_heads + h) * head_dim
            ahead = (slots[min(t + _TOKENS_AHEAD, num_tokens - 1)] * num_kv_heads + h) * head_dim * size
            for offset in range(0, head_dim * size, _LINE_BYTES):
                prefetch(plane, plane_numbers * size + ahead + offset)
            value = elements(values + place * size, head_dim, like)
            for d in range(head_dim):
                token[d] = read(value[d])
            for q in range(num_queries):
                weight = scores[q, t]
                if weight != 0:
                    output = outputs[q]
                    for d in range(head_dim):
                        output[d] += weight * token[d]
        for m in range(num_new):
            for g in range(num_shared):
                start = (h * num_shared + g) * head_dim
                target = buffer_row(call, fields[Field.TARGET], first + m, head_dim, start, like)
                for d in range(head_dim):
                    target[d] = rounded(outputs[m * num_shared + g, d], like)

    return attend


_attend_any, _attend_64, _attend_128 = (_attend_of(made_for) for made_for in (None, 64, 128))


@jit
def attend(call, fields, epsilon, scaling, item, scratch, like):  # type: ignore[no-untyped-def]
    if fields[Field.HEAD_DIM] == 64:
        _attend_64(call, fields, epsilon, scaling, item, scratch, like)
    elif fields[Field.HEAD_DIM] == 128:
        _attend_128(call, fields, epsilon, scaling, item, scratch, like)
    else:
        _attend_any(call, fields, epsilon, scaling, item, scratch, like)
