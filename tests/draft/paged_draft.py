"""Runs a DraftHead over a pool in which a row's slots are scattered. Slots without an owner hold NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.head import DraftHead
from common.model.loader import DTYPES

MAX_TOKENS = 64


class PagedDraft:
    """Rows 1 .. num_rows of a pool, which are empty at first in every layer. Table entries past a row's length point to
    slots without an owner.
    """

    def __init__(self, head: DraftHead, *, num_rows: int = 2) -> None:
        group = head.layer_group
        num_slots = 2 * num_rows * MAX_TOKENS + 1
        self.head = head
        self.kv = torch.full(
            (group.num_layers, group.num_planes, num_slots, group.num_heads, group.head_dim),
            float("nan"),
            dtype=DTYPES[group.dtype],
        )
        self.kv[:, :, 0] = 0
        numbers = 1 + torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(5))
        self._owned = numbers[: num_rows * MAX_TOKENS].view(num_rows, MAX_TOKENS)
        stale = numbers[num_rows * MAX_TOKENS :].view(num_rows, MAX_TOKENS)
        self._table = torch.cat([torch.zeros((1, MAX_TOKENS), dtype=torch.int64), stale])
        self._lens = {(layer, row): 0 for layer in range(group.num_layers) for row in range(1, num_rows + 1)}

    def extend(
        self, chunks: dict[int, tuple[Sequence[int], Tensor]], *, layer: int = 0, first_position: int = 0
    ) -> dict[int, Tensor]:
        """Extends rows by their next token ids, with hidden states [tokens, h]. Returns outputs [tokens, h] by row."""
        return self._forward(chunks, layer, first_position, is_decode=False)

    def decode(
        self, tokens: dict[int, tuple[int, Tensor]], *, layer: int = 0, first_position: int = 0
    ) -> dict[int, Tensor]:
        """Decodes one token for each row, with its hidden state [1, h]. Returns outputs [1, h] by row."""
        chunks = {row: ((token,), hidden) for row, (token, hidden) in tokens.items()}
        return self._forward(chunks, layer, first_position, is_decode=True)

    def slots(self, row: int, layer: int = 0) -> Tensor:
        """Returns the slots of the row's tokens so far."""
        return self._owned[row - 1, : self._lens[layer, row]]

    def _forward(
        self, chunks: dict[int, tuple[Sequence[int], Tensor]], layer: int, first_position: int, *, is_decode: bool
    ) -> dict[int, Tensor]:
        positions: list[int] = []
        slots: list[Tensor] = []
        prefix_lens = tuple(self._lens[layer, row] for row in chunks)
        extend_lens = tuple(len(ids) for ids, _ in chunks.values())
        for row, (ids, _) in chunks.items():
            start, stop = self._lens[layer, row], self._lens[layer, row] + len(ids)
            self._table[row, start:stop] = self._owned[row - 1, start:stop]
            slots.append(self._table[row, start:stop].clone())
            positions += range(first_position + start, first_position + stop)
            self._lens[layer, row] = stop
        seq_lens = [self._lens[layer, row] for row in chunks]
        output = self.head.forward(
            ForwardInput(
                input_ids=torch.tensor([token for ids, _ in chunks.values() for token in ids]),
                positions=torch.tensor(positions),
                out_cache_loc=torch.cat(slots),
                req_to_token=self._table,
                req_pool_indices=torch.tensor(list(chunks)),
                seq_lens=torch.tensor(seq_lens),
                prefix_lens=None if is_decode else prefix_lens,
                extend_lens=None if is_decode else extend_lens,
                max_seq_len=max(seq_lens),
                kv=self.kv,
                logits_rows=None,
            ),
            torch.cat([hidden for _, hidden in chunks.values()]),
            layer=layer,
        )
        return dict(zip(chunks, output.split(extend_lens), strict=True))
