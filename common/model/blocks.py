"""The decoder layers, and their parts, that are known well enough to be computed in fewer kernels.

Only blocks of the classes named here are replaced, and only where the installed transformers still computes with them
what the replacement does: others have modules of the same names and rotate in part, clip or scale. One block of a class
speaks for all of it, since they differ in weights only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralMLP,
    MistralRMSNorm,
)
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm

from common.attention.backend import AttentionPlan

ATTENTIONS = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP)
LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
NORMS = (LlamaRMSNorm, MistralRMSNorm, Phi3RMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
"""Other norms go by similar names and add one to the weight, or round elsewhere."""

_TOLERANCE = 1e-4  # in float32, relative to the largest number: sums are taken in another order


def mlp_agrees(block: nn.Module, replacement: nn.Module) -> bool:
    """Whether both compute the same in float32."""
    x = _random((2, linear_of(block, "gate_proj").in_features), block)
    return _agree(replacement(x), block(x))


def attention_agrees(block: nn.Module, replacement: nn.Module) -> bool:
    """Whether both attend with the same, and compute the same of that, in float32."""
    return all(_attend_alike(block, replacement, block, num_tokens) for num_tokens in (1, 3))


def layer_agrees(layer: nn.Module, replacement: nn.Module) -> bool:
    """The same of a whole layer, around its attention."""
    attention: nn.Module = layer.self_attn  # type: ignore[assignment]
    return all(_attend_alike(layer, replacement, attention, num_tokens) for num_tokens in (1, 3))


def _attend_alike(block: nn.Module, replacement: nn.Module, attention: nn.Module, num_tokens: int) -> bool:
    head_dim: int = attention.head_dim  # type: ignore[assignment]
    x = _random((1, num_tokens, linear_of(attention, "q_proj").in_features), block)
    cosines, sines = _random((2, 1, num_tokens, head_dim), block)
    expected, seen = _Echo(), _Echo()
    outputs = [
        module(x, position_embeddings=(cosines, sines), attention_mask=None, attention_plan=echo)
        for module, echo in ((block, expected), (replacement, seen))
    ]
    states, expected_states = (each if isinstance(each, Tensor) else each[0] for each in reversed(outputs))
    is_same = expected.scaling == seen.scaling and all(map(_agree, seen.tensors, expected.tensors))
    return is_same and _agree(states, expected_states)


class _Echo(AttentionPlan):
    """Keeps what it is asked to attend with, and answers with the query."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.scaling = scaling
        self.tensors = (query, key, value)
        return query.contiguous()


def _agree(seen: Tensor, expected: Tensor) -> bool:
    return seen.shape == expected.shape and bool((seen - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _random(shape: Sequence[int], block: nn.Module) -> Tensor:
    """The same numbers for the same shape, where the block is."""
    device = next(block.parameters()).device
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)).to(device)


def linear_of(block: nn.Module, name: str) -> nn.Linear:
    linear = getattr(block, name)
    assert type(linear) is nn.Linear
    return linear


def joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of all, one after the other."""
    first = linears[0]
    num_outputs = sum(linear.out_features for linear in linears)
    whole = nn.Linear(first.in_features, num_outputs, bias=first.bias is not None, device="meta")
    for name in dict(whole.named_parameters()):
        parts = [linear.get_parameter(name).detach() for linear in linears]
        setattr(whole, name, nn.Parameter(torch.cat(parts), requires_grad=False))
    return whole


def is_plain(block: nn.Module) -> bool:
    """Whether its linear layers are PyTorch's own."""
    return all(type(module) is nn.Linear for module in block.modules() if isinstance(module, nn.Linear))


def norm_parts(norm: Any) -> tuple[Tensor, float]:
    """The weight, and what is added to the mean of squares."""
    return norm.weight.detach(), float(norm.variance_epsilon)
