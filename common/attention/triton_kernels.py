"""The GPU's attention kernels, in Triton. triton_attention.py launches them and explains their arguments.

    write      writes K and V of each new token to its slot
    attend     for a block of one row's queries, one KV head, and one part of the row's tokens: softmax over that part
    combine    combines the parts of each query, weighted by their softmax sums

The score of a token that is not attended is -inf. Only the row's own slots are read, without V before a window. A
layer's `window`, `softcap` and `sinks` are those of LayerAttention. Only the last `num_kept` tokens of a row, which its
queries may attend, are divided into parts and read. The softmax has base 2; `scale_log2` accounts for that. Addresses
have 64 bits: a pool may hold over 2^31 numbers. If `OVERLAPS` is true, a kernel may start before the previous one ends,
and waits for it before any read or write.
"""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.device.triton_launch import device_function, kernel


@kernel(fixed=("kv", "plane_stride", "slot_stride"))
def write(  # type: ignore[no-untyped-def]
    key,
    value,
    kv,
    out_cache_loc,
    key_token_stride: tl.int64,
    key_head_stride: tl.int64,
    value_token_stride: tl.int64,
    value_head_stride: tl.int64,
    plane_stride: tl.int64,
    slot_stride: tl.int64,
    TOKEN_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Writes K and V of one token per program to the token's slot in `kv`, one layer of the pool.

    Each is TOKEN_SIZE = kv_heads * HEAD_DIM <= BLOCK numbers, which are adjacent in the slot.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_cache_loc + token).to(tl.int64)
    place = tl.arange(0, BLOCK)
    is_there = place < TOKEN_SIZE
    head, dim = place // HEAD_DIM, place % HEAD_DIM
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=is_there)
    values = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=is_there)
    target = kv + slot * slot_stride + place
    tl.store(target, keys, mask=is_there)
    tl.store(target + plane_stride, values, mask=is_there)


@device_function
def _part_size(num_tokens, TOKEN_BLOCK: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the size of each part, but the last, of a row of which `num_tokens` are read."""
    return tl.maximum(SPLIT_TOKENS, tl.cdiv(tl.cdiv(num_tokens, MAX_SPLITS), TOKEN_BLOCK) * TOKEN_BLOCK)


@device_function
def _tanh(x):  # type: ignore[no-untyped-def]
    fraction = tl.exp2(tl.abs(x) * -2.8853900817779268)
    size = (1.0 - fraction) / (1.0 + fraction)
    return tl.where(x < 0.0, -size, size)


@device_function
def _widened(numbers, like):  # type: ignore[no-untyped-def]
    """Returns numbers of the pool in the dtype of `like`. Those of uint8 are the bits of FP8 (e4m3).

    Exponent and fraction go to their places in a float16, whose exponent bias is 8 larger.
    """
    if numbers.dtype == tl.uint8:
        wide = numbers.to(tl.uint16)
        size = wide & 0x7F
        half = (((wide & 0x80) << 8) | (size << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(size == 0x7F, float("nan"), half).to(like.dtype)
    else:
        return numbers


@kernel(
    fixed=(
        "kv",
        "req_to_token",
        "sinks",
        "output",
        "log_weights",
        "plane_stride",
        "slot_stride",
        "kv_head_stride",
        "table_stride",
    )
)
def attend(  # type: ignore[no-untyped-def]
    query,
    kv,
    req_to_token,
    req_pool_indices,
    seq_lens,
    query_starts,
    tree_mask,
    path_lens,
    sinks,
    output,
    log_weights,
    scale_log2,
    softcap_log2,
    window,
    num_kept,
    mask_width,
    num_blocks,
    first_token: tl.int64,
    query_token_stride: tl.int64,
    query_head_stride: tl.int64,
    plane_stride: tl.int64,
    slot_stride: tl.int64,
    kv_head_stride: tl.int64,
    table_stride: tl.int64,
    NUM_SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attends one block of queries over one part of a row. The grid is [B * num_blocks, kv_heads, splits].

    A block's rows are (query, head) pairs. Heads that share K and V are adjacent, so these are loaded once for all of
    them. Without IS_SPLIT there is one part, and `output` [T, heads, HEAD_DIM] gets the result. If IS_SPLIT, `output`
    gets partial results, and `log_weights` the base-2 logarithm of each one's weight; `combine` reads both.

    `path_lens` [T] counts the columns of `tree_mask` that each query attends; it is read if there are both a mask,
    which is cut to the window already, and a window. `sinks` [heads] count in the first part.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    entry, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    kv_head, split = tl.program_id(1), tl.program_id(2)
    first = tl.load(query_starts + entry)
    num_new = tl.load(query_starts + entry + 1) - first
    seq_len = tl.load(seq_lens + entry)
    queries_per_block: tl.constexpr = QUERY_BLOCK // NUM_SHARED
    first_query = block * queries_per_block
    begin = tl.maximum(seq_len - num_kept, 0)
    end = seq_len
    if IS_SPLIT:
        size = _part_size(seq_len - begin, TOKEN_BLOCK, SPLIT_TOKENS, MAX_SPLITS)
        begin += split * size
        end = tl.minimum(begin + size, seq_len)
    if first_query < num_new and begin < end:
        if not HAS_MASK:  # no token after the block's last query is attended, nor one before its first query's window
            end = tl.minimum(end, seq_len - num_new + tl.minimum(first_query + queries_per_block, num_new))
            if HAS_WINDOW:
                begin = tl.maximum(begin, seq_len - num_new + first_query + 1 - window)
        pair = tl.arange(0, QUERY_BLOCK)
        place = first_query + pair // NUM_SHARED
        is_query = (pair < queries_per_block * NUM_SHARED) & (place < num_new)
        token = (first + place).to(tl.int64)
        head = kv_head * NUM_SHARED + pair % NUM_SHARED
        dim = tl.arange(0, DIM_BLOCK)
        is_dim = dim < HEAD_DIM
        q = tl.load(
            query + (token * query_token_stride + head * query_head_stride)[:, None] + dim[None, :],
            mask=is_query[:, None] & is_dim[None, :],
            other=0.0,
        )
        table = req_to_token + tl.load(req_pool_indices + entry).to(tl.int64) * table_stride
        kv_of_head = kv + kv_head * kv_head_stride
        largest = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
        total = tl.full([QUERY_BLOCK], 0.0, tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
            largest = tl.where(split == 0, sink, largest)
            total = tl.where(split == 0, total + 1.0, total)
        lowest = seq_len - num_new + place + 1 - window
        if HAS_MASK and HAS_WINDOW:
            path_len = tl.load(path_lens + token, mask=is_query, other=1)
            lowest = seq_len - mask_width + path_len - window
        weighted = tl.full([QUERY_BLOCK, DIM_BLOCK], 0.0, tl.float32)
        for start in range(begin, end, TOKEN_BLOCK):
            t = start + tl.arange(0, TOKEN_BLOCK)
            is_token = t < end
            slot = tl.load(table + t, mask=is_token, other=0).to(tl.int64) * slot_stride
            k = tl.load(kv_of_head + slot[None, :] + dim[:, None], mask=is_token[None, :] & is_dim[:, None], other=0)
            scores = tl.dot(q, _widened(k, q), input_precision="ieee") * scale_log2
            if HAS_SOFTCAP:
                scores = softcap_log2 * _tanh(scores / softcap_log2)
            if HAS_MASK:
                column = t - (seq_len - mask_width)
                in_mask = is_query[:, None] & ((column >= 0) & is_token)[None, :]
                attended = tl.load(tree_mask + token[:, None] * mask_width + column[None, :], mask=in_mask, other=1)
                is_attended = is_token[None, :] & (attended != 0)
            else:
                is_attended = is_token[None, :] & (t[None, :] <= (seq_len - num_new + place)[:, None])
            if HAS_WINDOW:
                is_before = t < seq_len - mask_width
                is_attended = is_attended & ((t[None, :] >= lowest[:, None]) | ~is_before[None, :])
                if HAS_MASK:  # a slot that no query attends may be another row's by now, and hold anything
                    is_token = tl.max((is_attended & is_query[:, None]).to(tl.int32), 0) != 0
            scores = tl.where(is_attended, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(scores - shift[:, None])
            faded = tl.exp2(largest - shift)
            total = total * faded + tl.sum(weights, 1)
            v = tl.load(
                kv_of_head + plane_stride + slot[:, None] + dim[None, :],
                mask=is_token[:, None] & is_dim[None, :],
                other=0,
            )
            v = _widened(v, q)
            weighted = weighted * faded[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
            largest = new_largest
        weighted = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        num_heads = tl.num_programs(1) * NUM_SHARED
        where = (token - first_token) * num_heads + head
        if IS_SPLIT:
            where = where * tl.num_programs(2) + split
            log_weight = tl.where(total == 0.0, float("-inf"), largest + tl.log2(total))
            tl.store(log_weights + where, log_weight, mask=is_query)
        tl.store(
            output + where[:, None] * HEAD_DIM + dim[None, :],
            weighted.to(output.dtype.element_ty),
            mask=is_query[:, None] & is_dim[None, :],
        )


@kernel(fixed=("parts", "log_weights", "output"))
def combine(  # type: ignore[no-untyped-def]
    parts,
    log_weights,
    seq_lens,
    query_starts,
    output,
    max_new,
    num_kept,
    num_splits,
    first_token: tl.int64,
    TOKEN_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Combines the partial results that `attend` wrote for each query. The grid is [B * max_new, heads].

    `parts` [N, heads, num_splits, HEAD_DIM] and `log_weights` [N, heads, num_splits] are the results and their weights,
    for the N new tokens of these B rows, the first of which is `first_token` of the forward. Only the parts that a
    row's last `num_kept` tokens fill are read. `output` [T, heads, HEAD_DIM] has room for all tokens of the forward.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    entry, place = tl.program_id(0) // max_new, tl.program_id(0) % max_new
    first = tl.load(query_starts + entry)
    if place < tl.load(query_starts + entry + 1) - first:
        num_read = tl.minimum(tl.load(seq_lens + entry), num_kept)
        size = _part_size(num_read, TOKEN_BLOCK, SPLIT_TOKENS, MAX_SPLITS)
        split = tl.arange(0, MAX_SPLITS)
        is_there = split < tl.cdiv(num_read, size)
        dim = tl.arange(0, DIM_BLOCK)
        is_dim = dim < HEAD_DIM
        token = (first + place).to(tl.int64)
        where = token * tl.num_programs(1) + tl.program_id(1)
        places = ((token - first_token) * tl.num_programs(1) + tl.program_id(1)) * num_splits + split
        log_weight = tl.load(log_weights + places, mask=is_there, other=float("-inf"))
        part = tl.load(
            parts + places[:, None] * HEAD_DIM + dim[None, :],
            mask=is_there[:, None] & is_dim[None, :],
            other=0.0,
        )
        weights = tl.exp2(log_weight - tl.max(log_weight, 0))
        combined = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
        tl.store(output + where * HEAD_DIM + dim, combined.to(output.dtype.element_ty), mask=is_dim)
