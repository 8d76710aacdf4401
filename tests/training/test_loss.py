"""Tests that the fused loss equals the plain formula."""

from __future__ import annotations

import pytest
import torch

from training.objective import soft_cross_entropy


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_value_and_gradient_are_those_of_the_plain_formula(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (3 * torch.randn(7, 50, generator=generator)).to(dtype)
    probs = (2 * torch.randn(7, 50, generator=generator)).softmax(-1)
    fused, plain = values.clone().requires_grad_(), values.float().requires_grad_()

    loss = soft_cross_entropy(fused, probs)
    expected = -(probs * plain.log_softmax(-1)).sum(-1).mean()
    (3 * loss).backward()
    (3 * expected).backward()

    torch.testing.assert_close(loss, expected)
    assert fused.grad is not None and plain.grad is not None
    assert fused.grad.dtype == dtype
    torch.testing.assert_close(fused.grad.float(), plain.grad, rtol=tolerance, atol=tolerance / 100)


def test_no_position_is_no_loss() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = soft_cross_entropy(logits, torch.zeros(0, 5))
    loss.backward()
    assert loss.item() == 0
