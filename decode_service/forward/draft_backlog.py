"""Stores the inputs that the draft head has not read yet, from steps that drafted nothing and left no draft seed.

A draft seed is the head's first drafts and hidden state, from which the next step drafts. A forward of the head over
one token per row is wasteful, because most of its time goes into reading the head's weights. So a step without drafts
only stores the target's hidden states and tokens. The head catches up in one forward when a draft seed is wanted or a
row has no room left here. The engine's thread knows how many tokens of each row are unread, because a step without
drafts commits one token per row.

steps    no seed   no seed   no seed   seed
unread      0         1         2       3   ─▶ the head reads 4 tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.upload import upload_array
from common.kv.pool import KvPool
from decode_service.forward.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """T tokens for the head to read; the tokens of one row are adjacent.

    `captured` [T, states * H] are the target's hidden states at these tokens: those of several layers side by side,
    each of size H. `next_ids` [T] is the token that follows each, which the head reads together with it. `last` [B] is,
    for each entry of the batch, the index of its last token that counts; the entry's tokens after that one belong to
    rejected drafts.
    """

    forward_input: ForwardInput
    captured: Tensor
    next_ids: Tensor
    last: Tensor


class DraftBacklog:
    """Buffers of unread head inputs, with space for `max_unread` tokens per pool row.

    Only the forward stream uses them. Row 0 absorbs padding.
    """

    def __init__(
        self, *, max_rows: int, max_unread: int, num_values: int, dtype: torch.dtype, torch_device: torch.device
    ) -> None:
        shape = (max_rows + 1, max_unread)
        self._captured = torch.zeros((*shape, num_values), dtype=dtype, device=torch_device)
        self._next_ids = torch.zeros(shape, dtype=torch.int64, device=torch_device)

    def put(self, batch: ForwardBatch, num_unread: NDArray[np.int64], captured: Tensor, next_ids: Tensor) -> None:
        """Stores the single token that each row gained in a step without drafts, for the head to read later.

        `captured` [B, states * H] and `next_ids` [B] are those of `UnreadTokens`.
        """
        places = upload_array(num_unread, next_ids.device)
        self._captured[batch.req_pool_indices, places] = captured
        self._next_ids[batch.req_pool_indices, places] = next_ids

    def unread(self, batch: ForwardBatch, num_unread: NDArray[np.int64], pool: KvPool, group: str) -> UnreadTokens:
        """Returns the head's input for all tokens of the batch's rows that it has not read: the tokens, the target's
        hidden states, and the slots for the head's KV. Call it after `put`.

        `group` names the layer group of `pool` in which the head's KV lies.
        """
        num_tokens = num_unread + 1
        prefix_lens = batch.seq_lens_cpu - num_tokens
        stops = num_tokens.cumsum()
        entry = np.arange(len(num_tokens)).repeat(num_tokens)
        place = np.arange(len(entry)) - (stops - num_tokens).repeat(num_tokens)
        columns = (entry, place, prefix_lens.repeat(num_tokens) + place, stops - 1)
        on_device = upload_array(np.concatenate(columns), self._next_ids.device)
        entries, places, positions, last = on_device.split([len(column) for column in columns])
        rows = batch.req_pool_indices[entries]
        next_ids = self._next_ids[rows, places]
        forward_input = ForwardInput(
            input_ids=next_ids,
            positions=positions,
            out_cache_loc=pool.rows.req_to_token[rows, positions],
            req_to_token=pool.rows.req_to_token,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            prefix_lens=tuple(prefix_lens.tolist()),
            extend_lens=tuple(num_tokens.tolist()),
            max_seq_len=int(batch.seq_lens_cpu.max(initial=0)),
            kv=pool.buffers[group],
            logits_rows=None,
        )
        return UnreadTokens(forward_input, self._captured[rows, places], next_ids, last)
