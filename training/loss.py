"""Soft cross-entropy against the target's distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax


class SoftCE(torch.autograd.Function):
    """Mean over N of the cross-entropy of `logits` [N, Vd] against `probs` [N, Vd] float32, rows of which sum to 1.

    The gradient is computed with the loss, in one buffer that is kept in the logits' dtype: a third of what autograd
    keeps of the plain formula.
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
