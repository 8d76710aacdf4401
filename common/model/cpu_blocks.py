"""Blocks of decoder layers on CPUs, computed in fewer kernels than their parts would take.

A block is replaced only where the replacement, run beside it on random numbers, gives what the block gives: names of
modules promise nothing.

    attention   q, k, v of one linear layer ─▶ (norms) ─▶ rotation ─▶ attention_plan ─▶ out
    gated MLP   down(silu(gate(x)) * up(x)), activation and product inside the linear layers' kernels
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.model.attention import AttentionPlan
from common.model.cpu_kernel import Kernel, jit, number_format
from common.model.cpu_linear import PackedLinear, can_pack

_TOLERANCE = 16  # of the dtype's precision, relative to the largest number: sums are taken in another order


class PackedAttention(nn.Module):
    """What `block`, a transformers attention module over plain linear layers, does with our attention registered."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._layer: int = block.layer_idx  # type: ignore[assignment]
        self._head_dim: int = block.head_dim  # type: ignore[assignment]
        self._scaling: float = block.scaling  # type: ignore[assignment]
        parts = [_linear(block, name) for name in ("q_proj", "k_proj", "v_proj")]
        self._num_heads = [part.out_features // self._head_dim for part in parts]
        self._qkv = PackedLinear(_joined(parts))
        self._out = PackedLinear(_linear(block, "o_proj"))
        self._q_norm = getattr(block, "q_norm", None)
        self._k_norm = getattr(block, "k_norm", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        attention_plan: AttentionPlan,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Shapes: hidden_states [1, T, hidden]; position_embeddings: cosines and sines, [1, T, head_dim]."""
        heads = self._qkv(hidden_states)[0].unflatten(-1, (-1, self._head_dim))
        query, key, value = heads.split(self._num_heads, dim=1)
        if self._q_norm is not None:
            query = self._q_norm(query)
        if self._k_norm is not None:
            key = self._k_norm(key)
        query, key = _rotated(query, position_embeddings), _rotated(key, position_embeddings)
        attended = attention_plan.attend(self._layer, query, key, value, self._scaling)
        return self._out(attended.flatten(1).unsqueeze(0)), None


class PackedGatedMLP(nn.Module):
    """What `block`, a gated MLP over plain linear layers with SiLU, does."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._gate, self._up, self._down = (
            PackedLinear(_linear(block, name)) for name in ("gate_proj", "up_proj", "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self._down(self._up.times(self._gate.silu(x), x))
        return output


def fuse_blocks(model: nn.Module) -> int:
    """Replace the blocks of a model on a CPU that a fused block agrees with. Returns how many."""
    num_fused = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                num_fused += 1
    return num_fused


def _fused(block: nn.Module) -> nn.Module | None:
    children = {name for name, _ in block.named_children()}
    if any(type(child) is nn.Linear and not can_pack(child.weight) for child in block.children()):
        return None
    if children - {"q_norm", "k_norm"} == {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return _fused_attention(block)
    if children - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"}:
        mlp = PackedGatedMLP(block)
        x = _random(_linear(block, "gate_proj"), 2, _linear(block, "gate_proj").in_features)
        return mlp if _agree(mlp(x), block(x)) else None
    return None


def _fused_attention(block: nn.Module) -> PackedAttention | None:
    known = {"hidden_states", "position_embeddings", "attention_mask"}
    if not known <= inspect.signature(block.forward).parameters.keys() or not hasattr(block, "scaling"):
        return None
    fused = PackedAttention(block)
    query = _linear(block, "q_proj")
    x = _random(query, 1, 3, query.in_features)
    rotation = (_random(query, 1, 3, block.head_dim), _random(query, 1, 3, block.head_dim))  # type: ignore[arg-type]
    expected, seen = _Echo(), _Echo()
    outputs = [
        module(x, position_embeddings=rotation, attention_mask=None, attention_plan=echo)[0]
        for module, echo in ((block, expected), (fused, seen))
    ]
    is_same = expected.scaling == seen.scaling and all(map(_agree, seen.tensors, expected.tensors))
    return fused if is_same and _agree(*outputs) else None


class _Echo(AttentionPlan):
    """Keeps what it is asked to attend with, and answers with the query."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.scaling = scaling
        self.tensors = (query, key, value)
        return query.contiguous()


def _agree(seen: Tensor, expected: Tensor) -> bool:
    if seen.shape != expected.shape:
        return False
    bound = _TOLERANCE * torch.finfo(expected.dtype).eps * expected.abs().max()
    return bool((seen.float() - expected.float()).abs().max() <= bound)


def _random(like: nn.Linear, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.weight.dtype)


def _linear(block: nn.Module, name: str) -> nn.Linear:
    linear = getattr(block, name)
    assert type(linear) is nn.Linear
    return linear


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of all, one after the other."""
    first = linears[0]
    num_outputs = sum(linear.out_features for linear in linears)
    joined = nn.Linear(first.in_features, num_outputs, bias=first.bias is not None, device="meta")
    for name in dict(joined.named_parameters()):
        parts = [linear.get_parameter(name).detach() for linear in linears]
        setattr(joined, name, nn.Parameter(torch.cat(parts), requires_grad=False))
    return joined


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """`x` [T, heads, head_dim], each head's halves rotated into each other by cosines and sines [1, T, head_dim]."""
    output = torch.empty(x.shape, dtype=x.dtype)
    array = number_format(x.dtype).array
    cosines, sines = rotation
    _rotate(x.dtype)(array(x), array(cosines[0]), array(sines[0]), array(output))
    return output


@cache
def _rotate(dtype: torch.dtype) -> Kernel:
    numbers = number_format(dtype)
    read, write = numbers.read, numbers.write

    @jit
    def rotate(x, cosines, sines, output):  # type: ignore[no-untyped-def]
        half = x.shape[2] // 2
        for t in range(x.shape[0]):
            for h in range(x.shape[1]):
                for d in range(half):
                    first, second = read(x[t, h, d]), read(x[t, h, half + d])
                    output[t, h, d] = write(first * read(cosines[t, d]) - second * read(sines[t, d]))
                    output[t, h, half + d] = write(
                        second * read(cosines[t, half + d]) + first * read(sines[t, half + d])
                    )

    head, angle = np.zeros((1, 1, 2), numbers.numpy_dtype), np.zeros((1, 2), numbers.numpy_dtype)
    rotate(head, angle, angle, head.copy())
    return rotate
