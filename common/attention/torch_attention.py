"""The reference attention backend, for any device. It gathers a row's KV and calls PyTorch's
scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.attention.backend import AttentionPlan, ForwardInput, KernelShape

_PADDING_SLOT = 0
_MAX_WINDOW = 32
"""The most new tokens per row for which all rows are attended in one call, if they have equally many."""


class TorchAttention:
    """An AttentionBackend that computes attention with PyTorch's own operators."""

    follows_lengths = False

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        return ()

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        extend_lens = set(batch.extend_lens or (1,))
        if len(extend_lens) == 1 and extend_lens.pop() <= _MAX_WINDOW:
            return _WindowPlan(batch)
        return ExtendPlan(batch)


def _row_slots(batch: ForwardInput) -> Tensor:
    """Returns each row's slots, [B, max_seq_len] int64. Entries past a row's length are arbitrary."""
    return batch.req_to_token[:, : batch.max_seq_len].index_select(0, batch.req_pool_indices)


def _additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def _write(kv: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    kv[0].index_copy_(0, slots, key)
    kv[1].index_copy_(0, slots, value)


class _WindowPlan:
    """A plan for rows that all have the same number of queries: all rows are attended in one call.

    Queries of heads that share a KV head are joined on the query axis, so KV heads need not be repeated.
    """

    def __init__(self, batch: ForwardInput) -> None:
        self._kv = batch.kv
        self._out_cache_loc = batch.out_cache_loc
        self._num_rows = batch.req_pool_indices.numel()
        self._num_queries = (batch.extend_lens or (1,))[0]
        self._num_tokens = batch.max_seq_len
        slots = _row_slots(batch)
        places = torch.arange(self._num_tokens, device=slots.device)
        held = places < batch.seq_lens.unsqueeze(1)
        self._slots = slots.where(held, _PADDING_SLOT).flatten()
        allowed = held.unsqueeze(1) & _attended(batch, self._num_rows, self._num_queries, places)
        self._mask = _additive_mask(allowed, batch.kv.dtype).unsqueeze(1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        kv = self._kv[layer]
        _write(kv, self._out_cache_loc, key, value)
        num_kv_heads, head_dim = key.shape[1:]
        keys, values = self._tokens(kv)
        grouped = query.view(self._num_rows, self._num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        num_shared = grouped.shape[2]
        output = scaled_dot_product_attention(
            grouped.flatten(2, 3), keys, values, attn_mask=self._mask.repeat(1, 1, num_shared, 1), scale=scaling
        )
        by_query: Tensor = output.unflatten(2, (num_shared, -1)).permute(0, 3, 1, 2, 4)
        return by_query.reshape(query.shape)

    def _tokens(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers the rows' keys and values from `kv` [2, slots, kv_heads, head_dim]: [B, kv_heads, tokens, head_dim]
        each.
        """
        tokens = kv.index_select(1, self._slots)
        tokens = tokens.view(2, self._num_rows, self._num_tokens, *kv.shape[2:]).transpose(2, 3)
        return tokens[0], tokens[1]


def _attended(batch: ForwardInput, num_rows: int, num_queries: int, places: Tensor) -> Tensor:
    """Returns for each query which tokens of its row it attends, [B, queries, tokens] bool. `places` [tokens] holds
    the tokens' positions, 0 to tokens - 1.
    """
    if batch.tree_mask is None:
        first = (batch.seq_lens - num_queries).unsqueeze(1)
        last = first + torch.arange(num_queries, device=places.device)
        return places <= last.unsqueeze(2)
    num_masked = batch.tree_mask.shape[1]
    in_mask = places - (batch.seq_lens - num_masked).unsqueeze(1)
    columns = in_mask.clamp(0, num_masked - 1).unsqueeze(1).expand(-1, num_queries, -1)
    return (in_mask < 0).unsqueeze(1) | batch.tree_mask.view(num_rows, num_queries, num_masked).gather(2, columns)


@dataclass(frozen=True, slots=True)
class _Extend:
    """One row's share of the forward: its new tokens are [start, stop) of all new tokens.

    `slots` holds the slots of all the row's tokens. It is None if the row has new tokens only: then their keys and
    values need not be read from the pool. `mask` is additive, [new tokens, all tokens]. It is None if the attention
    operator needs none: for a single new token, and for a row of new tokens only.
    """

    start: int
    stop: int
    slots: Tensor | None
    mask: Tensor | None


class ExtendPlan:
    """A plan for several new tokens per row. Rows are attended one by one."""

    def __init__(self, batch: ForwardInput) -> None:
        assert batch.prefix_lens is not None and batch.extend_lens is not None
        self._kv = batch.kv
        self._out_cache_loc = batch.out_cache_loc
        self._rows: list[_Extend] = []
        slots = _row_slots(batch)
        masks: dict[tuple[int, int], Tensor | None] = {}
        start = 0
        for row, (prefix_len, extend_len) in enumerate(zip(batch.prefix_lens, batch.extend_lens, strict=True)):
            stop = start + extend_len
            row_slots = slots[row, : prefix_len + extend_len] if prefix_len else None
            if batch.tree_mask is not None:
                mask: Tensor | None = _tree_mask(prefix_len + extend_len, batch.tree_mask[start:stop], like=batch.kv)
            else:
                shape = (prefix_len, extend_len)
                if shape not in masks:
                    masks[shape] = _causal_mask(prefix_len, extend_len, like=batch.kv)
                mask = masks[shape]
            self._rows.append(_Extend(start, stop, row_slots, mask))
            start = stop

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        kv = self._kv[layer]
        _write(kv, self._out_cache_loc, key, value)
        num_kv_heads, head_dim = key.shape[1:]
        num_shared = query.shape[1] // num_kv_heads
        outputs: list[Tensor] = []
        for row in self._rows:
            if row.slots is None:
                keys, values = key[row.start : row.stop], value[row.start : row.stop]
            else:
                keys, values = kv.index_select(1, row.slots)
            num_tokens = row.stop - row.start
            output = scaled_dot_product_attention(
                query[row.start : row.stop].view(num_tokens, num_kv_heads, num_shared, head_dim).permute(1, 2, 0, 3),
                _shared_by(num_shared, keys),
                _shared_by(num_shared, values),
                attn_mask=row.mask,
                is_causal=row.mask is None and row.slots is None and num_tokens > 1,
                scale=scaling,
            )
            outputs.append(output.permute(2, 0, 1, 3).reshape(num_tokens, -1, head_dim))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _causal_mask(prefix_len: int, extend_len: int, *, like: Tensor) -> Tensor | None:
    """Returns an additive causal mask [extend_len, prefix_len + extend_len], or None if the operator needs none.

    It needs none for a single new token, which attends all tokens, nor without a prefix, where the operator's own
    `is_causal` masks correctly. The mask has the dtype and the device of `like`.
    """
    if prefix_len == 0 or extend_len == 1:
        return None
    positions = torch.arange(prefix_len + extend_len, device=like.device)
    return _additive_mask(positions <= positions[prefix_len:].unsqueeze(1), like.dtype)


def _tree_mask(num_tokens: int, attended: Tensor, *, like: Tensor) -> Tensor:
    """Returns an additive mask [extend_len, num_tokens], in the dtype of `like`, for a row of `num_tokens` tokens, of
    which extend_len are new. `attended` [extend_len, W] says which of the row's last W tokens each query attends; every
    query attends all tokens before these.
    """
    num_queries, num_masked = attended.shape
    before = torch.ones((num_queries, num_tokens - num_masked), dtype=torch.bool, device=attended.device)
    return _additive_mask(torch.cat([before, attended], dim=1), like.dtype)


def _shared_by(num_shared: int, tokens: Tensor) -> Tensor:
    """Expands [tokens, kv_heads, head_dim] to [kv_heads, num_shared, tokens, head_dim] without a copy."""
    return tokens.transpose(0, 1).unsqueeze(1).expand(-1, num_shared, -1, -1)
