"""What the head has not read yet: the target's states and tokens of steps that drafted nothing and left no seed.

A forward of the head over one token a row mostly reads its weights. So a step without drafts puts down what the head
would have read, and the head catches up in one forward when a seed is wanted or a row has no room left here. How far
each row is behind, the schedule side knows: such a step commits one token a row.

steps   no seed   no seed   no seed   seed
lag        0         1         2       3   ─▶ the head reads 4 tokens
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from common.device.upload import upload
from common.kv.pool import KvPool
from common.model.attention import ForwardInput
from decode_service.schedule_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Unread:
    """T tokens for the head to read, each row's adjacent: `captured` [T, states * H], `next_ids` [T] the token after
    each, `last` [B] the place of each entry's last token that counts.
    """

    window: ForwardInput
    captured: Tensor
    next_ids: Tensor
    last: Tensor


class DraftBacklog:
    """A row of buffers for each pool row; row 0 absorbs padding. Touched on the forward stream alone."""

    def __init__(
        self, *, max_rows: int, max_lag: int, num_values: int, dtype: torch.dtype, torch_device: torch.device
    ) -> None:
        shape = (max_rows + 1, max_lag)
        self._captured = torch.zeros((*shape, num_values), dtype=dtype, device=torch_device)
        self._next_ids = torch.zeros(shape, dtype=torch.int64, device=torch_device)

    def put(self, batch: ForwardBatch, captured: Tensor, next_ids: Tensor) -> None:
        """The one token a row of a step without drafts: `captured` [B, states * H], `next_ids` [B]."""
        places = upload(batch.draft_lag, torch.int64, next_ids.device)
        self._captured[batch.req_pool_indices, places] = captured
        self._next_ids[batch.req_pool_indices, places] = next_ids

    def unread(self, batch: ForwardBatch, pool: KvPool, group: str) -> Unread:
        """Behind `put`: all that the head has not read of the batch's rows."""
        device = self._next_ids.device
        num_tokens = [lag + 1 for lag in batch.draft_lag]
        entries = upload([i for i, num in enumerate(num_tokens) for _ in range(num)], torch.int64, device)
        places = upload(list(itertools.chain.from_iterable(map(range, num_tokens))), torch.int64, device)
        last = upload([stop - 1 for stop in itertools.accumulate(num_tokens)], torch.int64, device)
        rows = batch.req_pool_indices[entries]
        positions = (batch.prefix_lens - upload(batch.draft_lag, torch.int64, device))[entries] + places
        next_ids = self._next_ids[rows, places]
        window = ForwardInput(
            input_ids=next_ids,
            positions=positions,
            out_cache_loc=pool.rows.req_to_token[rows, positions],
            req_to_token=pool.rows.req_to_token,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            prefix_lens=tuple(length - num for length, num in zip(batch.seq_lens_cpu, num_tokens, strict=True)),
            extend_lens=tuple(num_tokens),
            max_seq_len=max(batch.seq_lens_cpu, default=0),
            kv=pool.buffers[group],
            logits_rows=None,
        )
        return Unread(window, self._captured[rows, places], next_ids, last)
