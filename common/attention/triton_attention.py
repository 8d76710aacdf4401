"""Attention on GPUs, with kernels that read each row's slots in place from the paged pool.

With few new tokens per row (decode, verify, drafts), a row's tokens are split into parts that are attended in parallel
and then combined, so that a long row keeps the whole device busy. With many new tokens (prefill), the queries alone are
enough parallel work.

The parts of a row depend on its own length only. Whether rows are split, and how many queries a program takes, depends
on the largest number of new tokens of any row in the forward. So in a forward whose rows all have the same number of
new tokens, a row's result does not depend on the other rows. Otherwise, as in a forward of several prompts, other rows
may change the order in which a row's sums are taken, and so their rounding.

A plan launches the same kernels on the same grids for any row lengths up to `max_seq_len`. So a forward can be recorded
and replayed. No step waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from common.attention import triton_kernels
from common.attention.backend import MAX_SPLIT_BYTES, AttentionPlan, ForwardInput, KernelShape, LayerAttention
from common.attention.fp8_kv import FP8_BITS
from common.attention.torch_attention import in_window
from common.device.triton_launch import Launch, Launcher
from common.device.upload import upload
from common.errors import StartupError

_SPLIT_TOKENS = 128  # the least tokens of a part
_MAX_SPLITS = 32
_MAX_SPLIT_QUERIES = 32  # new tokens per row up to which splitting rows is faster
_MIN_BLOCK = 16  # the least size in a matrix product on the device


_KEPT_BYTES = 2048  # shared memory of a program that compiler and driver reserve

NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Tiles:
    """The amount of work that one program does at a time (queries and tokens of a row), its pipeline stages and its
    warps.
    """

    query_block: int
    token_block: int
    num_stages: int
    num_warps: int

    def shared_bytes(self, dim_block: int, itemsize: int) -> int:
        """Returns an upper bound of the shared memory that a program uses, in bytes.

        `dim_block` is the size of a head, rounded up to a power of two, and `itemsize` the bytes of a number. The bound
        covers queries, K and V, the weights or the sums, and the scores, to which a tree mask is applied.
        """
        loaded = (self.query_block + self.num_stages * self.token_block) * dim_block * itemsize
        sums = self.query_block * max(self.token_block * itemsize, dim_block * 4)
        return loaded + sums + self.query_block * self.token_block * 4 + _KEPT_BYTES

    @classmethod
    def of(
        cls,
        num_pairs: int,
        num_shared: int,
        dim_block: int,
        itemsize: int,
        shared_bytes: int,
        *,
        fp8_kv: bool = False,
    ) -> Tiles | None:
        """Chooses tiles for rows that have at most `num_pairs` (query, head) pairs for each KV head.

        `num_shared` query heads share a KV head. `dim_block` is the size of a head, rounded up to a power of two, and
        `itemsize` the bytes of a number. With `fp8_kv` the pool's numbers are widened in registers.

        Returns None if no tile fits into `shared_bytes` or into registers. If a tile is known to spill registers, this
        chooses a smaller tile, or more warps. float32 needs the most registers, because tensor cores would round it.
        """
        fewest = max(_MIN_BLOCK, triton.next_power_of_2(num_shared))
        row_bytes = dim_block * itemsize
        most = 64 if itemsize == 2 and row_bytes <= 256 else 32 if row_bytes <= 1024 else _MIN_BLOCK
        query_block = max(fewest, min(most, triton.next_power_of_2(num_pairs)))
        num_sums = query_block * dim_block
        if itemsize == 2:
            token_block = 64 if row_bytes <= 256 and query_block <= (32 if fp8_kv else 64) else 32
            num_stages = 2 if row_bytes <= 512 else 1
            most_of_four_warps = 64 if dim_block == 64 else 32  # smaller heads' scores spill with a mask
            is_large = row_bytes > 512 or query_block > most_of_four_warps or num_sums > 64 * 64
            is_large |= fp8_kv and num_sums >= 32 * 128
            num_warps = 8 if is_large else 4
        else:
            token_block = 32 if num_sums <= 64 * 64 and not fp8_kv else _MIN_BLOCK
            num_stages = 2 if query_block == _MIN_BLOCK and row_bytes <= 1024 else 1
            num_warps = 8 if query_block > _MIN_BLOCK or row_bytes > 256 else 4
            if query_block > 32 and num_sums > 64 * (64 if fp8_kv else 128):
                num_warps = 16
            if query_block > 64 and num_sums > 64 * 128:
                return None  # it spilled with any number of warps
        while True:
            tiles = cls(query_block, token_block, num_stages, num_warps)
            if tiles.shared_bytes(dim_block, itemsize) <= shared_bytes:
                return tiles
            if num_stages > 1:
                num_stages = 1
            elif token_block > _MIN_BLOCK:
                token_block //= 2
            elif query_block > fewest:
                query_block //= 2
            else:
                return None


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a layer: `num_heads` query heads over `num_kv_heads` heads of K and V, of `head_dim` numbers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_shared(self) -> int:
        """The number of query heads that share one head of K and V."""
        return self.num_heads // self.num_kv_heads

    @property
    def dim_block(self) -> int:
        block: int = triton.next_power_of_2(self.head_dim)
        return max(_MIN_BLOCK, block)


class TritonAttention:
    """An AttentionBackend for CUDA in float32, bfloat16 and float16. Heads may have any size, not only powers of two.

    Raises StartupError if a head does not fit into `shared_bytes`, the shared memory of one program. The partial
    results of split rows take at most `split_bytes` of device memory, unless a single row needs more. `overlaps` says
    whether the device starts a kernel before the previous one ends. `launch` runs each launch; a test may replace it.
    """

    follows_lengths = True

    def __init__(
        self,
        heads: HeadShape,
        *,
        shared_bytes: int = NO_LIMIT,
        split_bytes: int = MAX_SPLIT_BYTES,
        overlaps: bool = False,
        launch: Launcher = Launch.run,
    ) -> None:
        self.split_bytes = split_bytes
        self._heads = heads
        self._shared_bytes = shared_bytes
        self._overlaps = overlaps
        self._launch = launch
        for shape in self.kernel_shapes():
            self.tiles(shape.num_new)

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        """Returns forwards that cover every size of query block, with rows that are split and rows that are not."""
        few = [1 << power for power in range(_MAX_SPLIT_QUERIES.bit_length())]
        shapes = [
            *(KernelShape(num_new, num_new) for num_new in (*few, 2 * _MAX_SPLIT_QUERIES)),
            *(KernelShape(num_new, _SPLIT_TOKENS + num_new) for num_new in few),
        ]
        return [*shapes, *(replace(shape, has_mask=True) for shape in shapes)] if with_masks else shapes

    def tiles(self, max_new: int, *, fp8_kv: bool = False) -> Tiles:
        """Returns the tiles for a forward whose rows have at most `max_new` new tokens. `fp8_kv`: the pool is in FP8.

        Raises StartupError if no tiles fit the device.
        """
        heads, itemsize = self._heads, self._heads.dtype.itemsize
        num_pairs = max_new * heads.num_shared
        tiles = Tiles.of(num_pairs, heads.num_shared, heads.dim_block, itemsize, self._shared_bytes, fp8_kv=fp8_kv)
        if tiles is None:
            raise StartupError(
                f"attention: kernels for heads of {heads.head_dim} numbers, {heads.num_shared} to one of K and V, in "
                f"{str(heads.dtype).removeprefix('torch.')} need more than the {self._shared_bytes} bytes of shared "
                "memory, or than the registers, that this device gives a program; torch needs neither"
            )
        return tiles

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        return _TritonPlan(batch, self, self._heads, self._overlaps, self._launch)


@dataclass(frozen=True, slots=True)
class _InWindow:
    """The part of a plan that layers with the same window share.

    They read at most the last `num_kept` tokens of a row, in `num_splits` parts.

    `groups` are the rows, and their new tokens, that are attended together. `mask` [T, W] uint8 is the tree mask, cut
    to the window. `path_lens` [T] counts the columns of the whole tree mask that each new token attends.
    """

    num_kept: int
    num_splits: int
    groups: list[tuple[slice, range]]
    mask: Tensor | None
    path_lens: Tensor | None


class _TritonPlan:
    def __init__(
        self, batch: ForwardInput, backend: TritonAttention, heads: HeadShape, overlaps: bool, launch: Launcher
    ) -> None:
        assert batch.kv.is_contiguous(), "the kernels write to the pool itself"
        self._batch = batch
        self._heads = heads
        self._overlaps = overlaps
        self._launch = launch
        # The kernels need contiguous numbers; a caller's tensor may be a strided column of a wider one.
        self._out_cache_loc = batch.out_cache_loc.contiguous()
        self._req_pool_indices = batch.req_pool_indices.contiguous()
        self._seq_lens = batch.seq_lens.contiguous()
        self._num_rows = batch.req_pool_indices.shape[0]
        extend_lens = batch.extend_lens or (1,) * self._num_rows
        self._max_new = max(extend_lens, default=1)
        self._tiles = backend.tiles(self._max_new, fp8_kv=batch.kv.dtype == FP8_BITS)
        self._starts = _starts(extend_lens, batch.seq_lens.device)
        self._extend_lens = extend_lens
        self._split_bytes = backend.split_bytes
        self._in_window: dict[int | None, _InWindow] = {}

    def _cut(self, window: int | None) -> _InWindow:
        """Returns what layers with this window share."""
        mask, max_seq_len = self._batch.tree_mask, self._batch.max_seq_len
        num_kept = max_seq_len
        path_lens = None
        if window is not None:
            num_kept = min(max_seq_len, window + (self._max_new if mask is None else mask.shape[1]) - 1)
            if mask is not None:
                path_lens = mask.sum(1)
                mask = in_window(mask, window)
        is_few = self._max_new <= _MAX_SPLIT_QUERIES
        num_splits = min(_MAX_SPLITS, -(-num_kept // _SPLIT_TOKENS)) if is_few else 1
        mask = None if mask is None else mask.contiguous().view(torch.uint8)
        return _InWindow(num_kept, num_splits, self._cut_rows(num_splits), mask, path_lens)

    def _cut_rows(self, num_splits: int) -> list[tuple[slice, range]]:
        """Cuts the rows into groups whose partial results fit into the backend's `split_bytes`. Returns the rows and
        new tokens of each group.

        A row that does not fit is a group of its own. If rows are not split, all of them form one group. How a row is
        split depends only on its own length, not on its group.
        """
        stops = [0, *itertools.accumulate(self._extend_lens)]
        num_together = max(1, self._num_rows)
        if num_splits > 1:
            token_bytes = self._heads.num_heads * num_splits * (self._heads.head_dim + 1) * 4
            num_together = max(1, self._split_bytes // (token_bytes * self._max_new))
        return [
            (slice(first, stop), range(stops[first], stops[stop]))
            for first in range(0, self._num_rows, num_together)
            for stop in (min(first + num_together, self._num_rows),)
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._num_rows == 0:
            return output
        kv = self._batch.kv[layer]
        self._write(kv, key, value)
        query = _with_adjacent_numbers(query)
        if how.window not in self._in_window:
            self._in_window[how.window] = self._cut(how.window)
        for rows, tokens in self._in_window[how.window].groups:
            self._attend_rows(kv, query, output, how, rows, tokens)
        return output

    def _attend_rows(
        self, kv: Tensor, query: Tensor, output: Tensor, how: LayerAttention, rows: slice, tokens: range
    ) -> None:
        """Computes attention for the new `tokens` of some `rows`. Writes the result to `output` [T, heads,
        head_dim].
        """
        _, num_heads, head_dim = query.shape
        num_rows = rows.stop - rows.start
        tiles, num_shared = self._tiles, self._heads.num_shared
        num_blocks = -(-self._max_new // (tiles.query_block // num_shared))
        cut = self._in_window[how.window]
        is_split = cut.num_splits > 1
        parts, log_weights = output, output
        if is_split:
            shape = (len(tokens), num_heads, cut.num_splits)
            parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
            log_weights = torch.empty(shape, dtype=torch.float32, device=query.device)
        first_token = tokens.start if is_split else 0
        seq_lens, starts = self._seq_lens[rows], self._starts[rows.start : rows.stop + 1]
        batch = self._batch
        sizes = {"SPLIT_TOKENS": _SPLIT_TOKENS, "MAX_SPLITS": _MAX_SPLITS, "TOKEN_BLOCK": tiles.token_block}
        head = {"HEAD_DIM": head_dim, "DIM_BLOCK": self._heads.dim_block}
        self._launch(
            Launch(
                triton_kernels.attend,
                grid=(num_rows * num_blocks, self._heads.num_kv_heads, cut.num_splits),
                arguments={
                    "query": query,
                    "kv": kv,
                    "req_to_token": batch.req_to_token,
                    "req_pool_indices": self._req_pool_indices[rows],
                    "seq_lens": seq_lens,
                    "query_starts": starts,
                    "tree_mask": self._starts if cut.mask is None else cut.mask,
                    "path_lens": self._starts if cut.path_lens is None else cut.path_lens,
                    "sinks": output if how.sinks is None else how.sinks,
                    "output": parts,
                    "log_weights": log_weights,
                    "scale_log2": how.scaling * math.log2(math.e),
                    "softcap_log2": (how.softcap or 0.0) * math.log2(math.e),
                    "window": how.window or 0,
                    "num_kept": cut.num_kept,
                    "mask_width": 0 if cut.mask is None else cut.mask.shape[1],
                    "num_blocks": num_blocks,
                    "first_token": first_token,
                    "query_token_stride": query.stride(0),
                    "query_head_stride": query.stride(1),
                    "plane_stride": kv.stride(0),
                    "slot_stride": kv.stride(1),
                    "kv_head_stride": kv.stride(2),
                    "table_stride": batch.req_to_token.stride(0),
                },
                constants={
                    "NUM_SHARED": num_shared,
                    "QUERY_BLOCK": tiles.query_block,
                    "HAS_MASK": cut.mask is not None,
                    "HAS_WINDOW": how.window is not None,
                    "HAS_SOFTCAP": how.softcap is not None,
                    "HAS_SINKS": how.sinks is not None,
                    "IS_SPLIT": is_split,
                    "OVERLAPS": self._overlaps,
                    **head,
                    **sizes,
                },
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
                overlaps=self._overlaps,
            )
        )
        if is_split:
            self._launch(
                Launch(
                    triton_kernels.combine,
                    grid=(num_rows * self._max_new, num_heads),
                    arguments={
                        "parts": parts,
                        "log_weights": log_weights,
                        "seq_lens": seq_lens,
                        "query_starts": starts,
                        "output": output,
                        "max_new": self._max_new,
                        "num_kept": cut.num_kept,
                        "num_splits": cut.num_splits,
                        "first_token": first_token,
                    },
                    constants={"OVERLAPS": self._overlaps, **head, **sizes},
                    overlaps=self._overlaps,
                )
            )

    def _write(self, kv: Tensor, key: Tensor, value: Tensor) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        key, value = _with_adjacent_numbers(key), _with_adjacent_numbers(value)
        size = num_kv_heads * head_dim
        self._launch(
            Launch(
                triton_kernels.write,
                grid=(num_tokens,),
                arguments={
                    "key": key,
                    "value": value,
                    "kv": kv,
                    "out_cache_loc": self._out_cache_loc,
                    "key_token_stride": key.stride(0),
                    "key_head_stride": key.stride(1),
                    "value_token_stride": value.stride(0),
                    "value_head_stride": value.stride(1),
                    "plane_stride": kv.stride(0),
                    "slot_stride": kv.stride(1),
                },
                constants={
                    "TOKEN_SIZE": size,
                    "HEAD_DIM": head_dim,
                    "BLOCK": triton.next_power_of_2(size),
                    "OVERLAPS": self._overlaps,
                },
                overlaps=self._overlaps,
            )
        )


def _starts(extend_lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the index of each row's first new token, [B + 1] int64: row b has starts[b] .. starts[b + 1] - 1.

    If all rows have equally many, the tensor is made on the device, so that a recorded forward copies nothing from the
    host.
    """
    lengths = set(extend_lens)
    if len(lengths) == 1:
        step = lengths.pop()
        return torch.arange(0, len(extend_lens) * step + 1, step, device=device)
    return upload(list(itertools.accumulate(extend_lens, initial=0)), torch.int64, device)


def _with_adjacent_numbers(heads: Tensor) -> Tensor:
    """Returns `heads` [T, heads, head_dim], or a copy if the numbers of a head are not adjacent, as the kernels
    require.
    """
    return heads if heads.stride(2) == 1 or heads.shape[2] == 1 else heads.contiguous()
