"""Soft cross-entropy against the target's distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SoftCE(torch.autograd.Function):
    """Mean over N of the cross-entropy of `logits` [N, Vd] against `probs` [N, Vd] float32, rows of which sum to 1.

    The gradient is computed with the loss, in one buffer that is kept in the logits' dtype: a third of what autograd
    keeps of the plain formula.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor) -> Tensor:
        gradient = logits.float() if logits.dtype != torch.float32 else logits.clone()
        normalizer = gradient.logsumexp(-1, keepdim=True)
        scale = 1 / max(1, logits.shape[0])
        loss = (normalizer.squeeze(-1) - torch.einsum("nv,nv->n", probs, gradient)).sum() * scale
        gradient.sub_(normalizer).exp_().sub_(probs).mul_(scale)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output.to(gradient.dtype), None


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    loss: Tensor = SoftCE.apply(logits, probs)  # type: ignore[no-untyped-call]
    return loss
