"""The loss: soft cross-entropy against the target's distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax


class SoftCE(torch.autograd.Function):
    """Cross-entropy of `logits` [N, Vd] against the probabilities `probs` [N, Vd] float32, averaged over N.

    Each row of `probs` sums to 1. The gradient is computed together with the loss, and one buffer in the logits' dtype
    is kept for it: a third of the memory that autograd would keep.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor) -> Tensor:
        ctx.scale = 1 / max(1, logits.shape[0])
        gradient = log_softmax(logits, dim=-1, dtype=torch.float32)
        loss: Tensor = torch.einsum("nv,nv->", probs, gradient) * -ctx.scale
        gradient.exp_().sub_(probs)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        scaled: Tensor = gradient * (grad_output * ctx.scale)
        return scaled, None


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    loss: Tensor = SoftCE.apply(logits, probs)  # type: ignore[no-untyped-call]
    return loss
