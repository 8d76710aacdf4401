"""Attention on CPUs: one query a row reads the paged pool in place, by a kernel compiled when the model is loaded.

A row's slots lie anywhere, so hardware cannot foresee them: the kernel asks for the memory of tokens to come while it
works on this one. Without that a step of many rows waits for memory most of its time; figures in docs/models.md.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from common.model.attention import AttentionPlan, ForwardInput
from common.model.attention_torch import ExtendPlan
from common.model.cpu_kernel import Kernel, NumberFormat, jit, number_format, prefetch

_TOKENS_AHEAD = 16
_CACHE_LINE_BYTES = 64


class PagedCpuAttention:
    """An AttentionBackend for models whose layers all have `num_heads` query heads over `num_kv_heads` of `head_dim`.

    Decode forwards need neither gathered copies nor masks, and a short row costs nothing for a long one beside it.
    Making one compiles its kernel: a second or two.
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._numbers = number_format(dtype)
        self._kernel = _compiled(num_kv_heads, num_heads // num_kv_heads, head_dim, dtype)

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        return _DecodePlan(batch, self._kernel, self._numbers) if batch.is_decode else ExtendPlan(batch)


class _DecodePlan:
    def __init__(self, batch: ForwardInput, kernel: Kernel, numbers: NumberFormat) -> None:
        self._kernel = kernel
        self._array = numbers.array
        assert batch.kv.is_contiguous(), "the kernel writes to the pool itself"
        self._kv = self._array(batch.kv)
        self._max_seq_len = batch.max_seq_len
        columns = (batch.out_cache_loc, batch.req_to_token, batch.req_pool_indices, batch.seq_lens)
        self._rows = [column.to(torch.int64).contiguous().numpy() for column in columns]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype)
        array = self._array
        self._kernel(
            array(query),
            array(key),
            array(value),
            self._kv[layer],
            *self._rows,
            self._max_seq_len,
            scaling,
            array(output),
        )
        return output


@cache
def _compiled(num_kv_heads: int, num_shared: int, head_dim: int, dtype: torch.dtype) -> Kernel:
    """The kernel for one shape, compiled. The shape is part of the code, so that its loops become vector code."""
    numbers = number_format(dtype)
    read, write = numbers.read, numbers.write
    token_bytes = num_kv_heads * head_dim * dtype.itemsize

    @jit
    def decode(  # type: ignore[no-untyped-def]
        queries,
        keys,
        values,
        kv,
        out_cache_loc,
        req_to_token,
        req_pool_indices,
        seq_lens,
        max_seq_len,
        scaling,
        outputs,
    ):
        """Shapes: queries, outputs [B, heads, head_dim]; keys, values [B, kv_heads, head_dim]; kv [2, slots, kv_heads,
        head_dim]; the rest as in ForwardInput.
        """
        scores = np.empty((num_kv_heads, num_shared, max_seq_len), np.float32)
        query = np.empty((num_kv_heads, num_shared, head_dim), np.float32)
        output = np.empty((num_kv_heads, num_shared, head_dim), np.float32)
        plane_bytes = kv.shape[1] * token_bytes
        for b in range(queries.shape[0]):
            for h in range(num_kv_heads):
                for d in range(head_dim):
                    kv[0, out_cache_loc[b], h, d] = keys[b, h, d]
                    kv[1, out_cache_loc[b], h, d] = values[b, h, d]
        for b in range(queries.shape[0]):
            row = req_pool_indices[b]
            num_tokens = seq_lens[b]
            for h in range(num_kv_heads):
                for g in range(num_shared):
                    for d in range(head_dim):
                        query[h, g, d] = read(queries[b, h * num_shared + g, d]) * np.float32(scaling)
                        output[h, g, d] = np.float32(0)
            for t in range(num_tokens):
                slot = req_to_token[row, t]
                ahead = req_to_token[row, min(t + _TOKENS_AHEAD, num_tokens - 1)] * token_bytes
                for offset in range(0, token_bytes, _CACHE_LINE_BYTES):
                    prefetch(kv, ahead + offset)
                for h in range(num_kv_heads):
                    for g in range(num_shared):
                        score = np.float32(0)
                        for d in range(head_dim):
                            score += query[h, g, d] * read(kv[0, slot, h, d])
                        scores[h, g, t] = score
            for h in range(num_kv_heads):
                for g in range(num_shared):
                    largest = scores[h, g, 0]
                    for t in range(num_tokens):
                        largest = max(largest, scores[h, g, t])
                    total = np.float32(0)
                    for t in range(num_tokens):
                        weight = np.exp(scores[h, g, t] - largest)
                        scores[h, g, t] = weight
                        total += weight
                    for t in range(num_tokens):
                        scores[h, g, t] /= total
            for t in range(num_tokens):
                slot = req_to_token[row, t]
                ahead = req_to_token[row, min(t + _TOKENS_AHEAD, num_tokens - 1)] * token_bytes + plane_bytes
                for offset in range(0, token_bytes, _CACHE_LINE_BYTES):
                    prefetch(kv, ahead + offset)
                for h in range(num_kv_heads):
                    for g in range(num_shared):
                        weight = scores[h, g, t]
                        for d in range(head_dim):
                            output[h, g, d] += weight * read(kv[1, slot, h, d])
            for h in range(num_kv_heads):
                for g in range(num_shared):
                    for d in range(head_dim):
                        outputs[b, h * num_shared + g, d] = write(output[h, g, d])

    heads = np.zeros((1, num_kv_heads * num_shared, head_dim), numbers.numpy_dtype)
    token = np.zeros((1, num_kv_heads, head_dim), numbers.numpy_dtype)
    kv = np.zeros((2, 1, num_kv_heads, head_dim), numbers.numpy_dtype)
    index, table = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    decode(heads, token, token, kv, index, table, index, index + 1, 1, 1.0, heads.copy())
    return decode
