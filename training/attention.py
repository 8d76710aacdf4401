"""Attention for training a draft head with the training-time test, for all positions of a sequence at once.

In the training-time test every position i of a sequence starts a chain of draft steps, and each step but the first
works on the output of the step before instead of the target's states. Query i of step s stands for position i + s of
the chain that started at i. It attends

    step 0   to the keys of step 0 at positions up to i, which are made from the target's states
    step s   to these, and for each step from 1 to s to one more key: the one that its own chain made
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class ChainAttention:
    """The attention of all draft steps of one batch. Call `attend` once per step, in order."""

    def __init__(self, length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._future = torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes the attention of the next step. Returns [B, heads, L, d].

        `query` is [B, heads, L, d]; `key` and `value` are [B, kv_heads, L, d].
        """
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self._attend_chain(query)

    def _attend_chain(self, query: Tensor) -> Tensor:
        length, dim = query.shape[2:]
        # Query heads that share a KV head are stacked along the length, so that keys need not be repeated.
        grouped = query.unflatten(1, (self._keys[0].shape[1], -1))
        rows = grouped.flatten(0, 1).flatten(1, 2)
        num_shared = grouped.shape[2]
        scores = torch.baddbmm(
            self._future.repeat(num_shared, 1).unsqueeze(0),
            rows,
            self._keys[0].flatten(0, 1).transpose(1, 2),
            alpha=dim**-0.5,
        )
        own = [(grouped * key.unsqueeze(2)).sum(-1) * dim**-0.5 for key in self._keys[1:]]
        diagonals = torch.stack(own, dim=-1).flatten(0, 1).flatten(1, 2)
        weights = torch.cat([scores, diagonals], dim=-1).softmax(-1)
        output = torch.bmm(weights[..., :length], self._values[0].flatten(0, 1)).view_as(grouped)
        shares = weights[..., length:].view(*grouped.shape[:-1], len(own))
        for step, value in enumerate(self._values[1:]):
            output = output + shares[..., step : step + 1] * value.unsqueeze(2)
        return output.flatten(1, 2)
