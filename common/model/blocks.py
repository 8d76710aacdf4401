"""The decoder layers, and their parts, that the fused GPU and CPU code can replace.

Only blocks of exactly the classes named here are replaced: other architectures have modules of the same names that
rotate only part of a head, or that clip or scale. The `*_agree` functions check that the installed transformers still
computes the same as the replacement. One block of a class is checked for the whole class, since its blocks differ only
in their weights.
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
from transformers.models.mixtral.modeling_mixtral import MixtralAttention, MixtralRMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeMLP, Qwen3MoeRMSNorm

from common.attention.backend import AttentionPlan, LayerAttention

ATTENTIONS = (LlamaAttention, MistralAttention, MixtralAttention, Qwen2Attention, Qwen3Attention, Qwen3MoeAttention)
MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP, Qwen3MoeMLP)
LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
NORMS = (
    *(LlamaRMSNorm, MistralRMSNorm, Phi3RMSNorm, Qwen2RMSNorm, Qwen3RMSNorm),
    *(MixtralRMSNorm, OlmoeRMSNorm, Qwen3MoeRMSNorm),
)
"""The RMS norms that are known. Other classes have similar names, but add one to the weight or round elsewhere."""

_TOLERANCE = 1e-4  # in float32, relative to the largest number: sums are taken in another order


def mlp_agrees(block: nn.Module, replacement: nn.Module) -> bool:
    """Returns whether an MLP and its replacement compute the same in float32."""
    x = _random((2, linear_of(block, "gate_proj").in_features), block)
    return _agree(replacement(x), block(x))


def attention_agrees(block: nn.Module, replacement: nn.Module) -> bool:
    """Returns whether an attention block and its replacement compute the same in float32.

    They must pass the same queries, keys, values and LayerAttention to attention, and return the same output.
    """
    return all(_attend_alike(block, replacement, block, num_tokens) for num_tokens in (1, 3))


@torch.inference_mode()
def layer_attention(block: nn.Module) -> LayerAttention:
    """Returns how `block`, whose class is in ATTENTIONS, attends: what it hands to Baton's attention."""
    seen = _Echo()
    _run(block, block, 1, seen)
    return seen.how


def layer_agrees(layer: nn.Module, replacement: nn.Module) -> bool:
    """Returns whether a decoder layer and its replacement compute the same in float32, including attention's inputs."""
    attention: nn.Module = layer.self_attn  # type: ignore[assignment]
    return all(_attend_alike(layer, replacement, attention, num_tokens) for num_tokens in (1, 3))


def _attend_alike(block: nn.Module, replacement: nn.Module, attention: nn.Module, num_tokens: int) -> bool:
    expected, seen = _Echo(), _Echo()
    outputs = [_run(block, attention, num_tokens, expected), _run(replacement, attention, num_tokens, seen)]
    states, expected_states = (each if isinstance(each, Tensor) else each[0] for each in reversed(outputs))
    is_same = expected.how == seen.how and all(map(_agree, seen.tensors, expected.tensors))
    return is_same and _agree(states, expected_states)


def _run(block: nn.Module, attention: nn.Module, num_tokens: int, plan: AttentionPlan) -> Any:
    """Runs a block or a decoder layer with the sizes of `attention` on random numbers. Returns its output."""
    head_dim: int = attention.head_dim  # type: ignore[assignment]
    x = _random((1, num_tokens, linear_of(attention, "q_proj").in_features), attention)
    cosines, sines = _random((2, 1, num_tokens, head_dim), attention)
    return block(x, position_embeddings=(cosines, sines), attention_mask=None, attention_plan=plan)


class _Echo(AttentionPlan):
    """A fake attention plan for checking a block: it records its arguments and returns the query as the result."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        self.how = how
        self.tensors = (query, key, value)
        return query.contiguous()


def _agree(seen: Tensor, expected: Tensor) -> bool:
    return seen.shape == expected.shape and bool((seen - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _random(shape: Sequence[int], block: nn.Module) -> Tensor:
    """Returns normally distributed random numbers in the block's dtype, on its device. Equal shapes get equal
    numbers.
    """
    like = next(block.parameters())
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def linear_of(block: nn.Module, name: str) -> nn.Linear:
    linear = getattr(block, name)
    assert type(linear) is nn.Linear
    return linear


def joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Returns one linear layer whose outputs are the concatenated outputs of all `linears`, in order."""
    first = linears[0]
    num_outputs = sum(linear.out_features for linear in linears)
    whole = nn.Linear(first.in_features, num_outputs, bias=first.bias is not None, device="meta")
    for name in dict(whole.named_parameters()):
        parts = [linear.get_parameter(name).detach() for linear in linears]
        setattr(whole, name, nn.Parameter(torch.cat(parts), requires_grad=False))
    return whole


def is_plain(block: nn.Module) -> bool:
    """Returns whether all linear layers of `block` are exactly `nn.Linear`, and no subclass of it."""
    return all(type(module) is nn.Linear for module in block.modules() if isinstance(module, nn.Linear))


def norm_parts(norm: Any) -> tuple[Tensor, float]:
    """Returns the norm's weight, and the epsilon that it adds to the mean of squares."""
    return norm.weight.detach(), float(norm.variance_epsilon)
