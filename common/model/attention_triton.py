"""Attention on GPUs: kernels that read each row's slots where they lie in the paged pool.

Few new tokens a row (decode, verify, drafts): a row's tokens are cut into parts that are attended side by side and
then combined, so that a long row keeps the whole device busy. Many new tokens (prefill): the queries alone are enough.

How a row is cut depends on its own length; whether it is, and how many queries a program takes, on the most new tokens
that a row of the forward has. So in a decode forward, one new token each, a row's numbers are the same in any company;
with more they are where all rows have as many, and a prompt's are not: its sums may be taken in another order.

A plan launches the same kernels on the same grids whatever the rows' lengths, up to `max_seq_len`, so a forward can be
recorded and replayed; nothing in it waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.device.upload import upload
from common.model import triton_kernels
from common.model.attention import AttentionPlan, ForwardInput, KernelShape

_SPLIT_TOKENS = 128  # of a part at least
_MAX_SPLITS = 32
_MAX_SPLIT_QUERIES = 32  # of a row: with more, parts bring nothing
_MIN_BLOCK = 16  # what a matrix product on the device takes


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How much of a row one program takes at once."""

    query_block: int
    token_block: int
    num_stages: int

    @classmethod
    def of(cls, num_pairs: int, num_shared: int, dim_block: int, dtype: torch.dtype) -> _Tiles:
        """For a row's `num_pairs` (query, head) pairs that read the same keys. Bounded by a program's fast memory."""
        row_bytes = dim_block * dtype.itemsize
        most = 64 if row_bytes <= 256 else 32
        query_block = max(_MIN_BLOCK, min(most, _power_of_two(num_pairs)), _power_of_two(num_shared))
        return cls(query_block, 64 if row_bytes <= 256 else 32, 2 if row_bytes <= 512 else 1)


class TritonAttention:
    """An AttentionBackend for CUDA: heads of any size, also where it is no power of two; float32, bfloat16, float16."""

    follows_lengths = True

    def kernel_shapes(self) -> Sequence[KernelShape]:
        """Each number of queries that a program takes, of rows that are cut into parts and of rows that are not."""
        few = [1 << power for power in range(_MAX_SPLIT_QUERIES.bit_length())]
        whole = [KernelShape(num_new, max(num_new, 1)) for num_new in (*few, 2 * _MAX_SPLIT_QUERIES)]
        return [*whole, *(KernelShape(num_new, _SPLIT_TOKENS + num_new) for num_new in few)]

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        return _PagedPlan(batch)


class _PagedPlan:
    def __init__(self, batch: ForwardInput) -> None:
        assert batch.kv.is_contiguous(), "the kernels write to the pool itself"
        self._batch = batch
        # The kernels step through these one number at a time; a caller may hold a column of something wider.
        self._out_cache_loc = batch.out_cache_loc.contiguous()
        self._req_pool_indices = batch.req_pool_indices.contiguous()
        self._seq_lens = batch.seq_lens.contiguous()
        self._num_rows = batch.req_pool_indices.shape[0]
        extend_lens = batch.extend_lens or (1,) * self._num_rows
        self._max_new = max(extend_lens, default=1)
        self._starts = _starts(extend_lens, batch.seq_lens.device)
        is_few = self._max_new <= _MAX_SPLIT_QUERIES
        self._num_splits = min(_MAX_SPLITS, -(-batch.max_seq_len // _SPLIT_TOKENS)) if is_few else 1
        mask = batch.tree_mask
        self._mask = None if mask is None else mask.contiguous().view(torch.uint8)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._num_rows == 0:
            return output
        kv = self._batch.kv[layer]
        self._write(kv, key, value)
        (num_tokens, num_heads, head_dim), num_kv_heads = query.shape, key.shape[1]
        dim_block = max(_MIN_BLOCK, _power_of_two(head_dim))
        num_shared = num_heads // num_kv_heads
        tiles = _Tiles.of(self._max_new * num_shared, num_shared, dim_block, query.dtype)
        num_blocks = -(-self._max_new // (tiles.query_block // num_shared))
        is_split = self._num_splits > 1
        parts, log_weights = output, output
        if is_split:
            shape = (num_tokens, num_heads, self._num_splits)
            parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
            log_weights = torch.empty(shape, dtype=torch.float32, device=query.device)
        assert query.stride(2) == 1, "a head's numbers are adjacent"
        batch = self._batch
        triton_kernels.attend[(self._num_rows * num_blocks, num_kv_heads, self._num_splits)](
            query,
            kv,
            batch.req_to_token,
            self._req_pool_indices,
            self._seq_lens,
            self._starts,
            self._starts if self._mask is None else self._mask,
            parts,
            log_weights,
            scaling * math.log2(math.e),
            0 if self._mask is None else self._mask.shape[1],
            num_blocks,
            query.stride(0),
            query.stride(1),
            kv.stride(0),
            kv.stride(1),
            kv.stride(2),
            batch.req_to_token.stride(0),
            NUM_SHARED=num_shared,
            HEAD_DIM=head_dim,
            DIM_BLOCK=dim_block,
            QUERY_BLOCK=tiles.query_block,
            TOKEN_BLOCK=tiles.token_block,
            HAS_MASK=self._mask is not None,
            IS_SPLIT=is_split,
            SPLIT_TOKENS=_SPLIT_TOKENS,
            MAX_SPLITS=_MAX_SPLITS,
            num_stages=tiles.num_stages,
        )
        if is_split:
            triton_kernels.combine[(self._num_rows * self._max_new, num_heads)](
                parts,
                log_weights,
                self._seq_lens,
                self._starts,
                output,
                self._max_new,
                self._num_splits,
                TOKEN_BLOCK=tiles.token_block,
                HEAD_DIM=head_dim,
                DIM_BLOCK=dim_block,
                SPLIT_TOKENS=_SPLIT_TOKENS,
                MAX_SPLITS=_MAX_SPLITS,
            )
        return output

    def _write(self, kv: Tensor, key: Tensor, value: Tensor) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        assert key.stride(2) == value.stride(2) == 1, "a head's numbers are adjacent"
        size = num_kv_heads * head_dim
        triton_kernels.write[(num_tokens,)](
            key,
            value,
            kv,
            self._out_cache_loc,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            kv.stride(0),
            kv.stride(1),
            TOKEN_SIZE=size,
            HEAD_DIM=head_dim,
            BLOCK=_power_of_two(size),
        )


def _starts(extend_lens: tuple[int, ...], device: torch.device) -> Tensor:
    """[B + 1] int64: a row's new tokens are starts[b] .. starts[b + 1] - 1. Made on the device where all are alike, so
    that a recorded forward copies nothing from the host.
    """
    lengths = set(extend_lens)
    if len(lengths) == 1:
        step = lengths.pop()
        return torch.arange(0, len(extend_lens) * step + 1, step, device=device)
    return upload(list(itertools.accumulate(extend_lens, initial=0)), torch.int64, device)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
