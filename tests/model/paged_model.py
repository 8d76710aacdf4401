"""Runs a TargetModel over a pool in which a row's slots are scattered. Slots without an owner hold NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.kv.layer_group import LayerGroupSpec
from common.kv.window_slots import WindowKv
from common.model.target import TargetModel

MAX_TOKENS = 256


class PagedModel:
    """Rows 1 .. num_rows of a pool, empty at first. Table entries past a row's length point to slots without an
    owner.
    """

    def __init__(self, model: TargetModel, *, num_rows: int, scattered: bool = True) -> None:
        num_slots = 2 * num_rows * MAX_TOKENS + 1
        self._model = model

        def new_kv(group: LayerGroupSpec) -> Tensor:
            shape = (group.num_layers, group.num_planes, num_slots, group.num_heads, group.head_dim)
            kv = torch.full(shape, float("nan"), dtype=model.dtype)
            kv[:, :, 0] = 0
            return kv

        self._kv = new_kv(model.layer_group)
        numbers = torch.arange(1, num_slots)
        if scattered:
            numbers = numbers[torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(5))]
        self._owned = numbers[: num_rows * MAX_TOKENS].view(num_rows, MAX_TOKENS)
        stale = numbers[num_rows * MAX_TOKENS :].view(num_rows, MAX_TOKENS)
        self._table = torch.cat([torch.zeros((1, MAX_TOKENS), dtype=torch.int64), stale])
        self._windows = tuple(
            WindowKv(new_kv(window.group), self._table, torch.arange(num_slots), window.layers)
            for window in model.windows
        )
        self.lens = dict.fromkeys(range(1, num_rows + 1), 0)

    def extend(self, chunks: dict[int, Sequence[int]], *, logits_rows: Sequence[int] | None = None) -> Tensor:
        """Runs one forward over the next tokens of each row, in the dict's order. Returns the logits of each row's last
        token, or of the tokens at `logits_rows`.
        """
        prefix_lens = tuple(self.lens[row] for row in chunks)
        extend_lens = tuple(len(tokens) for tokens in chunks.values())
        last = torch.tensor(extend_lens).cumsum(0) - 1
        return self._forward(
            chunks,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            logits_rows=last if logits_rows is None else torch.tensor(logits_rows, dtype=torch.int64),
        )

    def decode(self, tokens: dict[int, int], *, max_seq_len: int | None = None) -> Tensor:
        """Runs one forward over one token of each row, in the dict's order. Returns its logits."""
        return self._forward({row: (token,) for row, token in tokens.items()}, max_seq_len=max_seq_len)

    def _forward(
        self,
        chunks: dict[int, Sequence[int]],
        *,
        prefix_lens: tuple[int, ...] | None = None,
        extend_lens: tuple[int, ...] | None = None,
        logits_rows: Tensor | None = None,
        max_seq_len: int | None = None,
    ) -> Tensor:
        positions: list[int] = []
        slots: list[Tensor] = []
        for row, tokens in chunks.items():
            start, stop = self.lens[row], self.lens[row] + len(tokens)
            self._table[row, start:stop] = self._owned[row - 1, start:stop]
            slots.append(self._table[row, start:stop].clone())
            positions += range(start, stop)
            self.lens[row] = stop
        seq_lens = [self.lens[row] for row in chunks]
        return self._model.forward(
            ForwardInput(
                input_ids=torch.tensor([token for tokens in chunks.values() for token in tokens]),
                positions=torch.tensor(positions),
                out_cache_loc=torch.cat(slots),
                req_to_token=self._table,
                req_pool_indices=torch.tensor(list(chunks)),
                seq_lens=torch.tensor(seq_lens),
                prefix_lens=prefix_lens,
                extend_lens=extend_lens,
                max_seq_len=max_seq_len or max(seq_lens),
                kv=self._kv,
                windows=self._windows,
                logits_rows=logits_rows,
            )
        ).logits
