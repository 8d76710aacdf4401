"""The operations of which a draft head's layers consist, with an implementation for each kind of device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

Rotation = tuple[Tensor, Tensor]
"""The cosines and sines of a rotary position embedding, [1, T, head_dim] each."""
Op = Callable[[Tensor], Tensor]
"""An operation on [T, inputs] with its weights built in."""


class Kernels(Protocol):
    """The operations of a draft head's layers, for one kind of device.

    `linear`, `norm` and `gated_mlp` take weights and return an operation on [T, inputs]. Linear weights are
    [outputs, inputs]. `rotated` has no weights and is itself an operation.
    """

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Op: ...

    def norm(self, weight: Tensor, epsilon: float) -> Op: ...

    def gated_mlp(self, gate: Tensor, up: Tensor, down: Tensor) -> Op: ...

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Applies a rotary position embedding to every head of `x` [T, heads, head_dim]. Returns the same shape.

        `rotation` holds the cosines and the sines, [1, T, head_dim] each.
        """


class TorchKernels:
    """Kernels made of PyTorch's own operators, for any device."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Op:
        return partial(linear, weight=weight, bias=bias)

    def norm(self, weight: Tensor, epsilon: float) -> Op:
        return rms_norm(weight, epsilon)

    def gated_mlp(self, gate: Tensor, up: Tensor, down: Tensor) -> Op:
        return lambda x: linear(silu(linear(x, gate)) * linear(x, up), down)

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        cosines, sines = (angles[0].unsqueeze(1) for angles in rotation)
        output: Tensor = x * cosines + rotate_half(x) * sines
        return output


def rms_norm(weight: Tensor, epsilon: float) -> LlamaRMSNorm:
    """Returns a module that RMS-normalises the last dimension and multiplies it by `weight`."""
    norm = LlamaRMSNorm(weight.shape[0], eps=epsilon)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm
