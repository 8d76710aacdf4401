"""Rows for tests of attention backends on any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.attention.backend import AttentionBackend, ForwardInput, LayerAttention
from common.attention.triton_attention import HeadShape, TritonAttention
from common.device.triton_launch import Launch, Launcher

LAYER = 1
_MAX_TOKENS = 1100


@dataclass(frozen=True, slots=True)
class Rows:
    """The input of a forward whose rows have slots in random places. Unused slots, and the slots of table entries past
    a row's length, hold NaN.
    """

    batch: ForwardInput
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(
        cls,
        lens: tuple[tuple[int, int], ...],
        *,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_seq_len: int | None = None,
        num_slots: int | None = None,
    ) -> Rows:
        """Makes rows. `lens` has (earlier tokens, new tokens) of each row, and `heads` is (query heads, KV heads).

        `num_slots` is the size of the pool, by default just enough.
        """
        generator = torch.Generator().manual_seed(len(lens) + head_dim)
        num_heads, num_kv_heads = heads
        num_rows, seq_lens = len(lens), [prefix + new for prefix, new in lens]
        num_slots = num_slots or sum(seq_lens) + 8

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        free = torch.randperm(num_slots - 1, generator=generator) + 1
        entries = torch.randperm(num_rows, generator=generator) + 1
        table = torch.full((num_rows + 1, _MAX_TOKENS), int(free[-1]))
        kv = torch.full((LAYER + 1, 2, num_slots, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
        kv[:, :, 0] = 0
        new_slots = []
        for entry, (prefix_len, num_new) in zip(entries.tolist(), lens, strict=True):
            slots, free = free[: prefix_len + num_new], free[prefix_len + num_new :]
            table[entry, : slots.numel()] = slots
            kv[:, :, slots[:prefix_len].to(device)] = random(LAYER + 1, 2, prefix_len, num_kv_heads, head_dim)
            new_slots.append(slots[prefix_len:])
        num_tokens = sum(num_new for _, num_new in lens)
        is_decode = all(num_new == 1 for _, num_new in lens)
        nothing = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        batch = ForwardInput(
            input_ids=nothing,
            positions=nothing,
            out_cache_loc=torch.cat(new_slots).to(device),
            req_to_token=table.to(device),
            req_pool_indices=entries.to(device),
            seq_lens=torch.tensor(seq_lens, device=device),
            prefix_lens=None if is_decode else tuple(prefix for prefix, _ in lens),
            extend_lens=None if is_decode else tuple(num_new for _, num_new in lens),
            max_seq_len=max_seq_len or max(seq_lens),
            kv=kv,
            logits_rows=None,
        )
        # As in transformers: the heads come before the tokens in memory.
        query, key, value = (
            random(num, num_tokens, head_dim).transpose(0, 1) for num in (num_heads, num_kv_heads, num_kv_heads)
        )
        return cls(batch, query, key, value)

    def with_drafts(self, num_masked: int) -> Rows:
        """Returns the rows with a random tree mask over the last `num_masked` tokens of each. Each new token attends
        itself. The rows must have equally many new tokens.
        """
        num_new = (self.batch.extend_lens or (1,))[0]
        num_rows = len(self.batch.seq_lens)
        mask = torch.rand((num_rows * num_new, num_masked), generator=torch.Generator().manual_seed(num_masked)) < 0.5
        itself = torch.arange(num_masked - num_new, num_masked).repeat(num_rows)
        mask[torch.arange(len(mask)), itself] = True
        return replace(self, batch=replace(self.batch, tree_mask=mask.to(self.query.device)))

    def with_kv(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Returns the rows with changed keys and values, those in the pool and the new ones."""
        batch = replace(self.batch, kv=change(self.batch.kv))
        return replace(self, batch=batch, key=change(self.key), value=change(self.value))

    def triton(self, launch: Launcher = Launch.run) -> TritonAttention:
        """Returns the GPU's attention backend for these heads."""
        (_, num_heads, head_dim), num_kv_heads = self.query.shape, self.key.shape[1]
        return TritonAttention(HeadShape(num_heads, num_kv_heads, head_dim, self.query.dtype), launch=launch)

    def attend(self, backend: AttentionBackend, how: LayerAttention | None = None) -> tuple[Tensor, Tensor]:
        """Computes attention with the backend, of a layer without a window by default. Returns its output, and the
        pool's KV afterwards.
        """
        kv = self.batch.kv.clone()
        how = how or LayerAttention(1 / math.sqrt(self.query.shape[2]))
        return backend.plan(replace(self.batch, kv=kv)).attend(LAYER, self.query, self.key, self.value, how), kv

    def check(self, seen: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
        """Asserts that output and KV equal the expected ones, that no output is NaN, and that no KV became NaN."""
        (output, kv), (expected_output, expected_kv) = seen, expected
        assert output.dtype == self.query.dtype and output.shape == self.query.shape
        assert torch.isfinite(expected_output).all()
        torch.testing.assert_close(output, expected_output, atol=tolerance, rtol=tolerance)
        assert torch.equal(kv.nan_to_num(7), expected_kv.nan_to_num(7))
        assert kv[LAYER].isnan().sum() < self.batch.kv[LAYER].isnan().sum()
