"""The input of one forward of the decode service: a snapshot that the schedule side makes and never changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.upload import device_copy
from common.grammar.matcher import NOT_FORCED
from common.kv.pool import KvPool
from common.sampling.state import SamplingBatch
from decode_service.speculate.spec_info import SpecInfo


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward. It owns its tensors and refers to no request and no ScheduleBatch.

    `req_pool_indices` [B] are the entries' rows in the pool, and `rows` the same on the host. The target computes M
    tokens per entry. `positions` [B * M] are the M positions after each entry's prefix; for a tree the worker computes
    others. `seq_lens` [B] includes the M tokens; `prefix_lens` [B] is the length of the KV before them. `seq_lens_sum`
    is the sum of `seq_lens`. `out_cache_loc` [B * S] are the slots after the prefix that the step may write, S for each
    entry. `undrafted` are the indices of entries whose requests want no drafts: their drafts are ignored.

    `forced` [B, levels] are the tokens that entries' grammars force, followed by NOT_FORCED; None if there are none.
    They are drafted in place of guesses. `num_forced` [B] counts each entry's forced tokens.
    """

    req_pool_indices: Tensor
    rows: NDArray[np.int64]
    seq_lens: Tensor
    prefix_lens: Tensor
    seq_lens_cpu: NDArray[np.int64]
    seq_lens_sum: int
    positions: Tensor
    out_cache_loc: Tensor
    sampling: SamplingBatch
    spec_info: SpecInfo
    undrafted: tuple[int, ...]
    forced: Tensor | None
    num_forced: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        *,
        req_pool_indices: Tensor,
        rows: NDArray[np.int64],
        seq_lens: Tensor,
        seq_lens_cpu: NDArray[np.int64],
        out_cache_loc: Tensor,
        sampling: SamplingBatch,
        spec_info: SpecInfo,
        undrafted: tuple[int, ...],
        forced: NDArray[np.int64] | None = None,
    ) -> ForwardBatch:
        """Builds a step's batch from copies of the schedule side's columns.

        `seq_lens` and `seq_lens_cpu` [B] are the lengths that the step was prepared with. Without drafts they include
        its one token; with drafts they include none of its tokens. `forced` is on the host.
        """
        num_tokens = spec_info.num_verify_tokens
        num_ahead = num_tokens if spec_info.has_drafts else 0
        seq_lens_cpu = seq_lens_cpu + num_ahead
        seq_lens = seq_lens + num_ahead if num_ahead else seq_lens.clone()
        prefix_lens = seq_lens - num_tokens
        return cls(
            req_pool_indices=req_pool_indices.clone(),
            rows=rows,
            seq_lens=seq_lens,
            prefix_lens=prefix_lens,
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            positions=prefix_lens if num_tokens == 1 else positions_from(prefix_lens, num_tokens).flatten(),
            out_cache_loc=out_cache_loc.clone(),
            sampling=sampling,
            spec_info=spec_info,
            undrafted=undrafted,
            forced=None if forced is None else device_copy(torch.from_numpy(forced), seq_lens.device),
            num_forced=np.zeros_like(rows) if forced is None else np.count_nonzero(forced != NOT_FORCED, axis=1),
        )

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_cpu)

    @property
    def num_tokens(self) -> int:
        """M: the number of tokens per entry that the target computes."""
        return self.spec_info.num_verify_tokens

    @property
    def has_drafts(self) -> bool:
        """Whether the step drafts. If so, only the forward finds out how many tokens it commits."""
        return self.spec_info.has_drafts

    @property
    def max_accept_len(self) -> int:
        """The largest number of tokens that the step commits per entry."""
        return self.spec_info.max_accept_len


def positions_from(starts: Tensor, num_tokens: int) -> Tensor:
    """Returns `num_tokens` consecutive positions for each start in `starts` [B], as [B, num_tokens]."""
    return starts.unsqueeze(1) + torch.arange(num_tokens, device=starts.device)


def forward_input_of(
    batch: ForwardBatch,
    tokens: Tensor,
    pool: KvPool,
    group: str,
    *,
    num_before: int = 0,
    positions: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> ForwardInput:
    """Builds the input of a forward over `tokens` [B, M], which follow each entry's prefix. They may be [B] if M is 1.

    `num_before` tokens of the same step come between the prefix and `tokens`. `group` names the layer group whose KV
    the forward uses. For a chain `positions` and `tree_mask` are None. For a tree `positions` [B, M] are those of the
    tokens, and `tree_mask` [B, M, num_before + M] says which of the step's tokens each one attends.
    """
    num_rows, num_tokens = tokens.shape[0], 1 if tokens.dim() == 1 else tokens.shape[1]
    seq_lens, slots = batch.seq_lens, batch.out_cache_loc
    if num_before or num_tokens != batch.num_tokens:
        seq_lens = batch.prefix_lens + (num_before + num_tokens)
    if slots.shape[0] != num_rows * num_tokens:
        slots = slots.view(num_rows, -1)[:, num_before : num_before + num_tokens].flatten()
    if positions is None:
        positions = _chain_positions(batch, num_before, num_tokens)
    is_decode = num_tokens == 1 and tree_mask is None
    prefix_lens_cpu = batch.seq_lens_cpu + (num_before - batch.num_tokens)
    return ForwardInput(
        input_ids=_flat(tokens),
        positions=_flat(positions),
        out_cache_loc=slots,
        req_to_token=pool.rows.req_to_token,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=seq_lens,
        prefix_lens=None if is_decode else tuple(prefix_lens_cpu.tolist()),
        extend_lens=None if is_decode else (num_tokens,) * num_rows,
        max_seq_len=int(prefix_lens_cpu.max(initial=0)) + num_tokens,
        kv=pool.buffers[group],
        windows=pool.windows_beside(group),
        logits_rows=None,
        tree_mask=None if tree_mask is None else tree_mask.flatten(0, 1),
    )


def _flat(tokens: Tensor) -> Tensor:
    return tokens if tokens.dim() == 1 else tokens.flatten()


def _chain_positions(batch: ForwardBatch, num_before: int, num_tokens: int) -> Tensor:
    if not num_before and num_tokens == batch.num_tokens:
        return batch.positions
    return positions_from(batch.prefix_lens + num_before, num_tokens)
