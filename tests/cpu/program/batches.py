"""Batches of rows with slots in random places of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.kv.layer_group import LayerGroupSpec


def scattered_batch(
    group: LayerGroupSpec,
    rows: Sequence[tuple[int, int]],
    *,
    vocab_size: int,
    mask: Tensor | None = None,
    asks_for_last: bool = False,
    unused: float | None = None,
) -> ForwardInput:
    """Returns a batch of rows, given as (earlier tokens, new tokens). With `asks_for_last` it asks for the logits of
    each row's last token. Slots of no earlier token hold `unused`, by default random numbers.

    It is a decode batch if each row has one new token and there is no mask.
    """
    generator = torch.Generator().manual_seed(sum(before + 7 * new for before, new in rows))
    num_new, seq_lens = [new for _, new in rows], [before + new for before, new in rows]
    num_slots = 2 * sum(seq_lens) + 2
    shape = (group.num_layers, group.num_planes, num_slots, group.num_heads, group.head_dim)
    kv = torch.randn(shape, generator=generator)
    slots = (torch.randperm(num_slots - 1, generator=generator) + 1)[: sum(seq_lens)].split(seq_lens)
    tables = torch.zeros((len(rows) + 1, max(seq_lens) + 8), dtype=torch.int64)
    for row, own in enumerate(slots, start=1):
        tables[row, : len(own)] = own
    earlier = torch.cat([own[:before] for own, (before, _) in zip(slots, rows, strict=True)])
    if unused is not None:
        kv[:, :, ~torch.isin(torch.arange(num_slots), earlier)] = unused
    is_decode = set(num_new) == {1} and mask is None
    return ForwardInput(
        input_ids=torch.randint(0, vocab_size, (sum(num_new),), generator=generator),
        positions=torch.cat([torch.arange(before, before + new) for before, new in rows]),
        out_cache_loc=torch.cat([own[before:] for own, (before, _) in zip(slots, rows, strict=True)]),
        req_to_token=tables,
        req_pool_indices=torch.arange(1, len(rows) + 1),
        seq_lens=torch.tensor(seq_lens),
        prefix_lens=None if is_decode else tuple(before for before, _ in rows),
        extend_lens=None if is_decode else tuple(num_new),
        max_seq_len=max(seq_lens),
        kv=kv.to(getattr(torch, group.dtype)),
        logits_rows=torch.tensor(num_new).cumsum(0) - 1 if asks_for_last else None,
        tree_mask=mask,
    )
