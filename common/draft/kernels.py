"""The operations of a draft head's layers, for each kind of device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

from common.cpu_engine import cpu_engine

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [1, T, head_dim] each."""
Op = Callable[[Tensor], Tensor]


class Kernels(Protocol):
    """Each member makes a function of [T, inputs] from weights on its device. Linear weights are [outputs, inputs]."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Op: ...

    def norm(self, weight: Tensor, epsilon: float) -> Op: ...

    def gated_mlp(self, gate: Tensor, up: Tensor, down: Tensor) -> Op: ...

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        """`x` [T, heads, head_dim], every head rotated."""


def kernels_for(device: torch.device) -> Kernels:
    engine = cpu_engine(device)
    return TorchKernels() if engine is None else engine.head_kernels()


class TorchKernels:
    """PyTorch's own operators, for any device."""

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
    norm = LlamaRMSNorm(weight.shape[0], eps=epsilon)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm
