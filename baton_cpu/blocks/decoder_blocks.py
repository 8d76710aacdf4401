"""Blocks of decoder layers on CPUs, computed in fewer kernels than their parts would take.

    attention   q, k, v of one linear layer ─▶ (norms) ─▶ rotation ─▶ attention_plan ─▶ out
    gated MLP   down(silu(gate(x)) * up(x)), activation and product inside the linear layers' kernels

Only blocks of the classes named here are replaced, and only where the installed transformers still computes with them
what the replacement does: others have modules of the same names and rotate in part, clip or scale.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from baton_cpu.blocks.linear import PackedLinear, can_pack
from baton_cpu.blocks.rotation import rotated
from common.model.attention import AttentionPlan
from common.model.replace import replace_modules

_ATTENTIONS = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
_MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP)
_TOLERANCE = 1e-4  # in float32, relative to the largest number: sums are taken in another order


class PackedAttention(nn.Module):
    """What `block`, one of _ATTENTIONS, does with our attention registered."""

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
        query, key = rotated(query, position_embeddings), rotated(key, position_embeddings)
        attended = attention_plan.attend(self._layer, query, key, value, self._scaling)
        return self._out(attended.flatten(1).unsqueeze(0)), None


class PackedGatedMLP(nn.Module):
    """What `block`, one of _MLPS with SiLU, does."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._gate, self._up, self._down = (
            PackedLinear(_linear(block, name)) for name in ("gate_proj", "up_proj", "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self._down(self._up.times(self._gate.silu(x), x))
        return output


def fuse_blocks(model: nn.Module) -> int:
    """Replace the known blocks of a model on a CPU. Returns how many."""
    trusted: dict[type[nn.Module], bool] = {}  # one block speaks for those of its class: they differ in weights only

    def fused(block: nn.Module) -> nn.Module | None:
        kind = type(block)
        replacement: type[PackedAttention] | type[PackedGatedMLP]
        agrees: Callable[[nn.Module], bool]
        if kind in _ATTENTIONS:
            replacement, agrees = PackedAttention, _attention_agrees
        elif kind in _MLPS:
            replacement, agrees = PackedGatedMLP, _mlp_agrees
        else:
            return None
        linears = [child for child in block.children() if isinstance(child, nn.Linear)]
        if not all(type(linear) is nn.Linear and can_pack(linear.weight) for linear in linears):
            return None
        if kind not in trusted:
            trusted[kind] = agrees(copy.deepcopy(block).float())
        return replacement(block) if trusted[kind] else None

    return replace_modules(model, fused)


def _mlp_agrees(block: nn.Module) -> bool:
    x = torch.randn((2, _linear(block, "gate_proj").in_features), generator=_generator())
    return _agree(PackedGatedMLP(block)(x), block(x))


def _attention_agrees(block: nn.Module) -> bool:
    generator = _generator()
    x = torch.randn((1, 3, _linear(block, "q_proj").in_features), generator=generator)
    head_dim: int = block.head_dim  # type: ignore[assignment]
    cosines, sines = torch.randn((2, 1, 3, head_dim), generator=generator)
    expected, seen = _Echo(), _Echo()
    outputs = [
        module(x, position_embeddings=(cosines, sines), attention_mask=None, attention_plan=echo)[0]
        for module, echo in ((block, expected), (PackedAttention(block), seen))
    ]
    is_same = expected.scaling == seen.scaling and all(map(_agree, seen.tensors, expected.tensors))
    return is_same and _agree(*reversed(outputs))


class _Echo(AttentionPlan):
    """Keeps what it is asked to attend with, and answers with the query."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.scaling = scaling
        self.tensors = (query, key, value)
        return query.contiguous()


def _agree(seen: Tensor, expected: Tensor) -> bool:
    return seen.shape == expected.shape and bool((seen - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


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
