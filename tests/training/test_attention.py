"""Tests that the attention of training equals attention with an explicit mask over the keys of all steps. Training runs
several steps of drafting, each on the outputs of the one before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.head import ChainAttention

_NUM_STEPS, _LENGTH = 4, 9


def _draw(num_heads: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, num_heads, _LENGTH, 8, generator=generator, requires_grad=True) for _ in range(_NUM_STEPS)]


def _masked(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Returns the expected output: query i attends to keys 0..i of the first step, and to key i of each later step."""
    seen = [torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).tril()]
    seen += [torch.eye(_LENGTH, dtype=torch.bool)] * (len(keys) - 1)
    key, value = (torch.cat(each, dim=2).repeat_interleave(3, dim=1) for each in (keys, values))
    scores = query @ key.transpose(-1, -2) / 8**0.5
    return scores.masked_fill(~torch.cat(seen, dim=1), float("-inf")).softmax(-1) @ value


def test_every_step_and_every_gradient_equal_a_masked_reference() -> None:
    queries, keys, values = _draw(6, seed=0), _draw(2, seed=1), _draw(2, seed=2)
    attention = ChainAttention(_LENGTH, dtype=torch.float32, device=torch.device("cpu"))
    outputs = [attention.attend(*step) for step in zip(queries, keys, values, strict=True)]
    expected = [_masked(query, keys[: step + 1], values[: step + 1]) for step, query in enumerate(queries)]
    weights = torch.randn(torch.stack(expected).shape, generator=torch.Generator().manual_seed(3))
    leaves = [*queries, *keys, *values]
    gradients = torch.autograd.grad((torch.stack(outputs) * weights).sum(), leaves)
    wanted = torch.autograd.grad((torch.stack(expected) * weights).sum(), leaves)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)
