"""The reference attention backend, for any device. It gathers a row's KV and calls PyTorch's
scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.attention.backend import AttentionPlan, ForwardInput, KernelShape, LayerAttention
from common.attention.fp8_kv import widened

_PADDING_SLOT = 0
MAX_SCORE_BYTES = 64 << 20
"""The size of the scores in float32 that are in memory at once, where PyTorch's operator for attention cannot be used.
Some three copies of them exist for a moment.
"""
_MAX_WINDOW = 32
"""The most new tokens per row for which all rows are attended in one call, if they have equally many."""


class TorchAttention:
    """An AttentionBackend that computes attention with PyTorch's own operators.

    `kv_heads` are the heads of the pool that the layers have; None means all.
    """

    def __init__(self, kv_heads: range | None = None) -> None:
        self._kv_heads = kv_heads

    follows_lengths = False

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        return ()

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        extend_lens = set(batch.extend_lens or (1,))
        if self._kv_heads is not None:
            batch = with_kv_heads(batch, self._kv_heads)
        if len(extend_lens) == 1 and extend_lens.pop() <= _MAX_WINDOW:
            return _WindowPlan(batch)
        return ExtendPlan(batch)


def with_kv_heads(batch: ForwardInput, heads: range) -> ForwardInput:
    """Returns `batch` with only these KV heads of the pool."""
    return replace(batch, kv=batch.kv[:, :, :, heads.start : heads.stop])


def _row_slots(batch: ForwardInput) -> Tensor:
    """Returns each row's slots, [B, max_seq_len] int64. Entries past a row's length are arbitrary."""
    return batch.req_to_token[:, : batch.max_seq_len].index_select(0, batch.req_pool_indices)


def _additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def _write(kv: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    kv[0].index_copy_(0, slots, key)
    kv[1].index_copy_(0, slots, value)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The tokens that are read for each row: their `slots` [B * tokens], and which of them each query attends, as an
    additive `mask` [B, 1, queries, tokens].
    """

    slots: Tensor
    mask: Tensor


class _WindowPlan:
    """A plan for rows that all have the same number of queries: all rows are attended in one call.

    Queries of heads that share a KV head are joined on the query axis, so KV heads need not be repeated.
    """

    def __init__(self, batch: ForwardInput) -> None:
        self._batch = batch
        self._num_rows = batch.req_pool_indices.numel()
        self._num_queries = (batch.extend_lens or (1,))[0]
        self._row_slots = _row_slots(batch)
        self._gathered: dict[int | None, _Gathered] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        kv = self._batch.kv[layer]
        _write(kv, self._batch.out_cache_loc, key, value)
        num_kv_heads, head_dim = key.shape[1:]
        if how.window not in self._gathered:
            self._gathered[how.window] = self._gather(how.window, query.dtype)
        gathered = self._gathered[how.window]
        tokens = (
            widened(kv.index_select(1, gathered.slots), query.dtype)
            .view(2, self._num_rows, -1, *kv.shape[2:])
            .transpose(2, 3)
        )
        grouped = query.view(self._num_rows, self._num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        num_shared = grouped.shape[2]
        mask = gathered.mask.repeat(1, 1, num_shared, 1)
        sinks = None
        if how.sinks is not None:
            sinks = how.sinks.view(num_kv_heads, num_shared).repeat_interleave(self._num_queries, 1).unsqueeze(2)
        output = weighted_values(grouped.flatten(2, 3), tokens[0], tokens[1], how, mask=mask, sinks=sinks)
        by_query: Tensor = output.unflatten(2, (num_shared, -1)).permute(0, 3, 1, 2, 4)
        return by_query.reshape(query.shape)

    def _gather(self, window: int | None, dtype: torch.dtype) -> _Gathered:
        """Returns the tokens that layers with this window read: all of a row, or its last ones that may be needed.

        The mask is of `dtype`.
        """
        batch = self._batch
        num_last = self._num_queries if batch.tree_mask is None else batch.tree_mask.shape[1]
        num_tokens = batch.max_seq_len if window is None else min(batch.max_seq_len, window + num_last - 1)
        seq_lens = batch.seq_lens.unsqueeze(1)
        places = torch.arange(num_tokens, device=seq_lens.device).expand(self._num_rows, -1)
        if window is not None:
            places = places + (seq_lens - num_tokens).clamp(min=0)
        held = places < seq_lens
        allowed = held.unsqueeze(1) & _attended(batch, self._num_rows, self._num_queries, places)
        slots = self._row_slots[:, :num_tokens]
        if window is not None:
            allowed = in_window(allowed, window)
            held = allowed.any(1)
            slots = self._row_slots.gather(1, places.where(held, 0))
        mask = _additive_mask(allowed, dtype).unsqueeze(1)
        return _Gathered(slots.where(held, _PADDING_SLOT).flatten(), mask)


def in_window(attended: Tensor, window: int) -> Tensor:
    """Returns which tokens a window leaves: of each query's `attended` [..., tokens] bool only the last `window`."""
    num_after = attended.flip(-1).cumsum(-1).flip(-1)
    return attended & (num_after <= window)


def weighted_values(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    how: LayerAttention,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention: for each query the sum of `values`, weighted by the softmax of its scores.

    Shapes: query [..., heads, queries, head_dim]; keys, values [..., heads, tokens, head_dim]; mask, additive,
    broadcasts to [..., heads, queries, tokens], and `sinks` to [..., heads, queries, 1]. The window and the sinks of
    `how` itself are not read. With `is_causal` there is no mask, and query i attends the first i + 1 tokens.
    """
    if how.softcap is None and sinks is None:
        return scaled_dot_product_attention(query, keys, values, mask, is_causal=is_causal, scale=how.scaling)
    *batch, num_queries, _ = query.shape
    num_tokens = keys.shape[-2]
    if is_causal:
        allowed = torch.ones((num_queries, num_tokens), dtype=torch.bool, device=query.device).tril()
        mask = _additive_mask(allowed, query.dtype)
    if sinks is not None:
        sinks = sinks.expand(*batch, num_queries, 1)
    outputs = []
    num_at_once = max(1, MAX_SCORE_BYTES // (4 * num_tokens * math.prod(batch)))
    for first in range(0, num_queries, num_at_once):
        some = slice(first, first + num_at_once)
        scores = (query[..., some, :] @ keys.transpose(-1, -2)).float().mul_(how.scaling)
        if how.softcap is not None:
            scores = scores.div_(how.softcap).tanh_().mul_(how.softcap)
        if mask is not None:
            scores = scores + mask[..., some, :]
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            weights = torch.cat([scores, sinks[..., some, :].float()], -1).softmax(-1)[..., :-1]
        outputs.append(weights.to(values.dtype) @ values)
    return torch.cat(outputs, dim=-2)


def _attended(batch: ForwardInput, num_rows: int, num_queries: int, places: Tensor) -> Tensor:
    """Returns for each query which tokens of its row it attends, [B, queries, tokens] bool. `places` [B, tokens] are
    the tokens' positions in their rows.
    """
    places = places.unsqueeze(1)
    if batch.tree_mask is None:
        first = (batch.seq_lens - num_queries).unsqueeze(1)
        last = first + torch.arange(num_queries, device=places.device)
        return places <= last.unsqueeze(2)
    num_masked = batch.tree_mask.shape[1]
    in_mask = places - (batch.seq_lens - num_masked).view(-1, 1, 1)
    columns = in_mask.clamp(0, num_masked - 1).expand(-1, num_queries, -1)
    return (in_mask < 0) | batch.tree_mask.view(num_rows, num_queries, num_masked).gather(2, columns)


@dataclass(frozen=True, slots=True)
class _Extend:
    """One row's share of the forward: its new tokens are [start, stop) of all new tokens.

    `slots` holds the slots of the tokens that are read. It is None if only the row's new tokens are read: their keys
    and values need not come from the pool. `mask` is additive, [new tokens, tokens that are read]. It is None if the
    attention operator needs none: for a single new token, and for new tokens only.
    """

    start: int
    stop: int
    slots: Tensor | None
    mask: Tensor | None


class ExtendPlan:
    """A plan for several new tokens per row. Rows are attended one by one."""

    def __init__(self, batch: ForwardInput) -> None:
        assert batch.prefix_lens is not None and batch.extend_lens is not None
        self._batch = batch
        self._slots = _row_slots(batch)
        self._cut: dict[int | None, list[_Extend]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        kv = self._batch.kv[layer]
        _write(kv, self._batch.out_cache_loc, key, value)
        outputs: list[Tensor] = []
        if how.window not in self._cut:
            self._cut[how.window] = self._rows(how.window, query.dtype)
        for row in self._cut[how.window]:
            if row.slots is None:
                keys, values = key[row.start : row.stop], value[row.start : row.stop]
            else:
                keys, values = kv.index_select(1, row.slots)
            keys, values = widened(keys, query.dtype), widened(values, query.dtype)
            is_causal = row.mask is None and row.slots is None
            outputs.append(_attend_row(query[row.start : row.stop], keys, values, how, row.mask, is_causal=is_causal))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _rows(self, window: int | None, dtype: torch.dtype) -> list[_Extend]:
        """Returns what each row reads in layers with this window. Masks are of `dtype`."""
        batch = self._batch
        assert batch.prefix_lens is not None and batch.extend_lens is not None
        rows: list[_Extend] = []
        masks: dict[tuple[int, int], Tensor | None] = {}
        start = 0
        for row, (prefix_len, num_new) in enumerate(zip(batch.prefix_lens, batch.extend_lens, strict=True)):
            stop, seq_len = start + num_new, prefix_len + num_new
            tree_mask = None if batch.tree_mask is None else batch.tree_mask[start:stop]
            num_last = num_new if tree_mask is None else tree_mask.shape[1]
            num_read = seq_len if window is None else min(seq_len, window + num_last - 1)
            slots = self._slots[row, seq_len - num_read : seq_len] if num_read > num_new else None
            if tree_mask is not None:
                attended = _attended_of_tree(num_read, tree_mask, window)
                mask: Tensor | None = _additive_mask(attended, dtype)
                slots = None if slots is None else slots.where(attended.any(0), _PADDING_SLOT)
            else:
                shape = (num_read - num_new, num_new)
                if shape not in masks:
                    masks[shape] = _causal_mask(*shape, window, dtype=dtype, device=batch.kv.device)
                mask = masks[shape]
            rows.append(_Extend(start, stop, slots, mask))
            start = stop
        return rows


def attend_prompt(query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
    """Computes attention of one row without a pool: the row has these tokens only, and each attends those up to itself.

    Shapes: query [T, heads, head_dim]; key, value [T, kv_heads, head_dim]; returns [T, heads, head_dim].
    """
    mask = _causal_mask(0, query.shape[0], how.window, dtype=key.dtype, device=key.device)
    return _attend_row(query, key, value, how, mask, is_causal=mask is None)


def _attend_row(
    query: Tensor, keys: Tensor, values: Tensor, how: LayerAttention, mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Computes attention of one row. Shapes: query and result [queries, heads, head_dim]; keys, values [tokens,
    kv_heads, head_dim]; mask, additive, [queries, tokens].
    """
    num_queries, _, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    num_shared = grouped.shape[1]
    output = weighted_values(
        grouped,
        _shared_by(num_shared, keys),
        _shared_by(num_shared, values),
        how,
        mask=mask,
        is_causal=is_causal and num_queries > 1,
        sinks=None if how.sinks is None else how.sinks.view(num_kv_heads, num_shared, 1, 1),
    )
    return output.permute(2, 0, 1, 3).reshape(num_queries, -1, head_dim)


def _causal_mask(
    num_before: int, num_new: int, window: int | None, *, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Returns an additive causal mask [num_new, num_before + num_new], or None if the operator needs none.

    The operator needs none for a single new token, which attends all tokens, nor without earlier tokens, where its own
    `is_causal` masks correctly. With a window it may need one in both cases.
    """
    is_limited = window is not None and window < num_before + num_new
    if not is_limited and (num_before == 0 or num_new == 1):
        return None
    positions = torch.arange(num_before + num_new, device=device)
    last = positions[num_before:].unsqueeze(1)
    attended = positions <= last
    if window is not None:
        attended &= positions > last - window
    return _additive_mask(attended, dtype)


def _attended_of_tree(num_tokens: int, tree_mask: Tensor, window: int | None) -> Tensor:
    """Returns which of a row's last `num_tokens` tokens each query attends, [queries, num_tokens] bool.

    `tree_mask` [queries, W] says this for the last W tokens. Every query attends all earlier tokens, as far as the
    window allows.
    """
    num_queries, num_masked = tree_mask.shape
    before = torch.ones((num_queries, num_tokens - num_masked), dtype=torch.bool, device=tree_mask.device)
    attended = torch.cat([before, tree_mask], dim=1)
    return attended if window is None else in_window(attended, window)


def _shared_by(num_shared: int, tokens: Tensor) -> Tensor:
    """Expands [tokens, kv_heads, head_dim] to [kv_heads, num_shared, tokens, head_dim] without a copy."""
    return tokens.transpose(0, 1).unsqueeze(1).expand(-1, num_shared, -1, -1)
