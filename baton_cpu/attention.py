"""Paged attention for CPUs: a kernel, compiled when the model is loaded, reads keys and values directly from the KV
pool.

A request's slots may lie anywhere in the pool, so the hardware cannot prefetch them. The kernel therefore prefetches
the memory of later tokens while it works on the current one. Without that, a step of many requests would mostly wait
for memory (benchmarks/measurements.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_cpu.compiler.jit import Kernel, exp, jit
from baton_cpu.compiler.kernel_cache import compiled
from baton_cpu.compiler.memory import address_of
from baton_cpu.compiler.numbers import NumberFormat, number_format, read, rounded_as_torch
from baton_cpu.compiler.vectors import LINE_BYTES, prefetch
from common.attention.backend import AttentionPlan, ForwardInput, KernelShape, LayerAttention
from common.attention.fp8_kv import FP8_BITS
from common.attention.torch_attention import ExtendPlan, with_kv_heads

_TOKENS_AHEAD = 16
NUM_LANES = 16
MAX_QUERIES = 32  # per row: with more, gathering its KV once costs less than reading it for each query


class PagedCpuAttention:
    """An AttentionBackend whose kernel reads the KV pool in place. All layers of the model must have `num_heads` query
    heads over `num_kv_heads` KV heads, each of `head_dim` numbers. A pool has dtype `dtype`, or FP8 too with `fp8_kv`.
    If it has more KV heads, the layers' begin at `first_kv_head`.

    Decode and verify forwards gather no copies of KV, and a short request does not wait for a long one in the same
    batch. The constructor loads the kernels from disk or compiles them, a second or two each, more on slow CPUs.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        first_kv_head: int = 0,
        fp8_kv: bool = False,
    ) -> None:
        self._kv_heads = range(first_kv_head, first_kv_head + num_kv_heads)
        self._numbers = number_format(dtype)
        self._kernels = {
            kv_dtype: _compiled(num_kv_heads, num_heads // num_kv_heads, head_dim, dtype, kv_dtype)
            for kv_dtype in (dtype, *((FP8_BITS,) if fp8_kv else ()))
        }

    follows_lengths = True

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        return ()

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        if max(batch.extend_lens or (1,), default=1) > MAX_QUERIES:
            return ExtendPlan(with_kv_heads(batch, self._kv_heads))
        return _KernelPlan(batch, self._kernels[batch.kv.dtype], self._numbers, self._kv_heads.start)


class _KernelPlan:
    def __init__(self, batch: ForwardInput, kernel: Kernel, numbers: NumberFormat, first_kv_head: int) -> None:
        self._kernel = kernel
        self._first_kv_head = first_kv_head
        self._array = numbers.array
        self._kv_array = number_format(batch.kv.dtype).array
        assert batch.kv.is_contiguous(), "the kernel writes to the pool itself"
        self._kv = self._kv_array(batch.kv)
        self._max_seq_len = batch.max_seq_len
        columns = (batch.out_cache_loc, batch.req_to_token, batch.req_pool_indices, batch.seq_lens)
        self._rows = [column.to(torch.int64).contiguous().numpy() for column in columns]
        extend_lens = batch.extend_lens or (1,) * batch.req_pool_indices.shape[0]
        self._starts = np.cumsum((0, *extend_lens), dtype=np.int64)
        self._extend_lens = extend_lens
        self._attended, self._num_masked = attended_tokens(batch, extend_lens)
        self._in_window: dict[int | None, tuple[NDArray[np.bool_], NDArray[np.int64]]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype)
        array = self._array
        if how.window not in self._in_window:
            self._in_window[how.window] = self._cut(how.window)
        sinks = np.empty(0, np.float32) if how.sinks is None else how.sinks.detach().float().numpy()
        self._kernel(
            array(query),
            self._kv_array(key),
            self._kv_array(value),
            self._kv[layer],
            self._first_kv_head,
            *self._rows,
            self._starts,
            *self._in_window[how.window],
            self._num_masked,
            self._max_seq_len,
            how.scaling,
            how.softcap or 0.0,
            sinks,
            array(output),
        )
        return output

    def _cut(self, window: int | None) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Returns the mask [T, W] cut to the window, and the first token that each new token attends before the mask,
        [T] int64.
        """
        attended = self._attended
        if window is None:
            return attended, np.zeros(len(attended), np.int64)
        num_after = attended[:, ::-1].cumsum(axis=1)[:, ::-1]
        num_unmasked = (self._rows[-1] - self._num_masked).repeat(self._extend_lens)
        first: NDArray[np.int64] = np.maximum(num_unmasked - window + num_after[:, 0], 0)
        return attended & (num_after <= window), first


def attended_tokens(batch: ForwardInput, extend_lens: tuple[int, ...]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Builds the attention mask of a forward's new tokens, the queries. `extend_lens` [B] says how many each row has.

    Returns `attended` [T, W] bool and `num_masked` [B] int64. The mask says for the last `num_masked[b]` tokens of row
    b (at most W) which of them each query attends; each query attends all earlier tokens of its row.

    The mask means nothing for rows with more than MAX_QUERIES queries. A query of such a row attends all tokens up to
    itself.
    """
    if batch.tree_mask is not None:
        mask = batch.tree_mask.contiguous().numpy()
        return mask, np.full(len(extend_lens), mask.shape[1], dtype=np.int64)
    if not extend_lens:
        return np.ones((0, 1), np.bool_), np.zeros(0, np.int64)
    causal = np.tri(max(extend_lens), min(max(extend_lens), MAX_QUERIES), dtype=np.bool_)
    return np.concatenate([causal[:extend_len] for extend_len in extend_lens]), np.array(extend_lens, dtype=np.int64)


@jit
def largest(numbers, num_numbers, lanes):
    """Returns the largest of the first `num_numbers` numbers of a float32 array. NaNs are ignored; if all are NaN,
    returns -inf.

    `lanes` [NUM_LANES] float32 is scratch memory: each lane keeps a maximum of its own. The compiler cannot turn a
    single running maximum into vector code, because a number may be NaN.
    """
    for lane in range(NUM_LANES):
        lanes[lane] = -np.inf
    num_whole = num_numbers - num_numbers % NUM_LANES
    for first in range(0, num_whole, NUM_LANES):
        for lane in range(NUM_LANES):
            number = numbers[first + lane]
            lanes[lane] = number if number > lanes[lane] else lanes[lane]
    highest = np.float32(-np.inf)
    for lane in range(NUM_LANES):
        highest = lanes[lane] if lanes[lane] > highest else highest
    for place in range(num_whole, num_numbers):
        highest = numbers[place] if numbers[place] > highest else highest
    return highest


@jit
def capped(score, softcap):
    """Returns softcap * tanh(score / softcap), in float32."""
    fraction = exp(np.float32(-2) * np.abs(score) / softcap)
    size = softcap * (np.float32(1) - fraction) / (np.float32(1) + fraction)
    return -size if score < 0 else size


@cache
def _compiled(num_kv_heads: int, num_shared: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Kernel:
    """Returns the compiled attention kernel for heads of one shape, queries of `dtype` and a KV pool of `kv_dtype`.
    `num_shared` query heads share a KV head. The shape is part of the code, so that loops over it become vector code.
    """
    head_bytes = head_dim * kv_dtype.itemsize
    own_bytes = num_kv_heads * head_bytes

    def attend(
        queries,
        keys,
        values,
        kv,
        first_kv_head,
        out_cache_loc,
        req_to_token,
        req_pool_indices,
        seq_lens,
        starts,
        attended,
        firsts,
        num_masked,
        max_seq_len,
        scaling,
        softcap,
        sinks,
        outputs,
    ):
        """Writes the new keys and values to the pool, and attends each query over its row's slots. Results go to
        `outputs`.

        `scaling`, `softcap` and `sinks` are those of LayerAttention: a softcap of 0 and sinks [0] mean none.

        Shapes: queries, outputs [T, heads, head_dim]; keys, values [T, kv_heads, head_dim]; kv, one layer of the pool,
        [2, slots, heads, head_dim], where the layer's heads begin at `first_kv_head`; starts [B + 1]: the queries of
        row b are starts[b] .. starts[b + 1] - 1. `num_masked` comes from `attended_tokens`, `attended` and `firsts`
        from `_KernelPlan`. The other arguments are those of ForwardInput, with all indices int64.
        """
        num_queries = 1
        for b in range(starts.shape[0] - 1):
            num_queries = max(num_queries, starts[b + 1] - starts[b])
        scores = np.empty((num_kv_heads, num_queries, num_shared, max_seq_len), np.float32)
        query = np.empty((num_kv_heads, num_queries, num_shared, head_dim), np.float32)
        output = np.empty((num_kv_heads, num_queries, num_shared, head_dim), np.float32)
        token = np.empty(head_dim, np.float32)
        lanes = np.empty(NUM_LANES, np.float32)
        token_bytes = kv.shape[2] * head_bytes
        keys_at = address_of(kv) + first_kv_head * head_bytes
        values_at = keys_at + kv.shape[1] * token_bytes
        for i in range(queries.shape[0]):
            for h in range(num_kv_heads):
                for d in range(head_dim):
                    kv[0, out_cache_loc[i], first_kv_head + h, d] = keys[i, h, d]
                    kv[1, out_cache_loc[i], first_kv_head + h, d] = values[i, h, d]
        for b in range(starts.shape[0] - 1):
            row = req_pool_indices[b]
            num_tokens = seq_lens[b]
            first = starts[b]
            num_new = starts[b + 1] - first
            num_unmasked = num_tokens - num_masked[b]
            lowest = num_tokens
            for m in range(num_new):
                lowest = min(lowest, firsts[first + m])
            num_read = num_tokens - lowest
            for m in range(num_new):
                for h in range(num_kv_heads):
                    for g in range(num_shared):
                        for d in range(head_dim):
                            query[h, m, g, d] = read(queries[first + m, h * num_shared + g, d]) * np.float32(scaling)
                            output[h, m, g, d] = np.float32(0)
            for t in range(lowest, num_tokens):
                slot = req_to_token[row, t]
                ahead = req_to_token[row, min(t + _TOKENS_AHEAD, num_tokens - 1)] * token_bytes + keys_at
                for offset in range(0, own_bytes, LINE_BYTES):
                    prefetch(ahead + offset)
                for h in range(num_kv_heads):
                    for d in range(head_dim):
                        token[d] = read(kv[0, slot, first_kv_head + h, d])
                    for m in range(num_new):
                        is_attended = t >= firsts[first + m]
                        if t >= num_unmasked:
                            is_attended = attended[first + m, t - num_unmasked]
                        if is_attended:
                            for g in range(num_shared):
                                score = np.float32(0)
                                for d in range(head_dim):
                                    score += query[h, m, g, d] * token[d]
                                if softcap > 0:
                                    score = capped(score, np.float32(softcap))
                                scores[h, m, g, t - lowest] = score
                        else:
                            for g in range(num_shared):
                                scores[h, m, g, t - lowest] = -np.inf
            for h in range(num_kv_heads):
                for m in range(num_new):
                    for g in range(num_shared):
                        highest = largest(scores[h, m, g], num_read, lanes)
                        total = np.float32(0)
                        if sinks.shape[0]:
                            sink = sinks[h * num_shared + g]
                            highest = max(highest, sink)
                            total = exp(sink - highest)
                        for place in range(num_read):
                            weight = exp(scores[h, m, g, place] - highest)
                            scores[h, m, g, place] = weight
                            total += weight
                        share = np.float32(1) / total
                        for place in range(num_read):
                            scores[h, m, g, place] *= share
            for t in range(lowest, num_tokens):
                slot = req_to_token[row, t]
                ahead = req_to_token[row, min(t + _TOKENS_AHEAD, num_tokens - 1)] * token_bytes + values_at
                for offset in range(0, own_bytes, LINE_BYTES):
                    prefetch(ahead + offset)
                for h in range(num_kv_heads):
                    for d in range(head_dim):
                        token[d] = read(kv[1, slot, first_kv_head + h, d])
                    for m in range(num_new):
                        for g in range(num_shared):
                            weight = scores[h, m, g, t - lowest]
                            if weight != 0:
                                for d in range(head_dim):
                                    output[h, m, g, d] += weight * token[d]
            for m in range(num_new):
                for h in range(num_kv_heads):
                    for g in range(num_shared):
                        for d in range(head_dim):
                            outputs[first + m, h * num_shared + g, d] = rounded_as_torch(output[h, m, g, d], outputs)

    kv_numpy_dtype = number_format(kv_dtype).numpy_dtype
    heads = np.zeros((1, num_kv_heads * num_shared, head_dim), number_format(dtype).numpy_dtype)
    token = np.zeros((1, num_kv_heads, head_dim), kv_numpy_dtype)
    kv = np.zeros((2, 1, num_kv_heads, head_dim), kv_numpy_dtype)
    index, table = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    starts, attended = np.arange(2), np.ones((1, 1), np.bool_)
    one, sinks = index + 1, np.empty(0, np.float32)
    rows, masks = (index, table, index, one, starts), (attended, index, one)
    arguments = heads, token, token, kv, 0, *rows, *masks, 1, 1.0, 0.0, sinks, heads.copy()
    return compiled(attend, arguments, name=f"attention-{num_kv_heads}-{num_shared}-{head_dim}-{dtype}-{kv_dtype}")
