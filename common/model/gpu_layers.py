"""Decoder layers on a GPU, computed with few kernels.

    many tokens   norm ─▶ q, k, v ─▶ rotation ─▶ attention_plan ─▶ out ─▶ sum, norm ─▶ gate, up ─▶ gated ─▶ down, sum
    one token     norm, q, k, v ─▶ rotation ─▶ attention_plan ─▶ out, sum ─▶ norm, gate, up, gated ─▶ down, sum

Each step between two arrows is one kernel, except the attention plan, which may launch several. The weights of q, k and
v are joined into one matrix, and so are those of gate and up. The model's own copies are freed. In a cut layer the
ranks add up what `out` and `down` return, and then the states are added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from common.attention.backend import AttentionPlan
from common.model.blocks import (
    ATTENTIONS,
    LAYERS,
    MLPS,
    NORMS,
    is_plain,
    joined,
    layer_agrees,
    layer_attention,
    linear_of,
    norm_parts,
)
from common.model.layers_triton import LayerKernels, Norm
from common.model.replace import replace_modules


class GpuDecoderLayer(nn.Module):
    """A fused decoder layer, made from `layer`, whose class is one of LAYERS. It computes the same as `layer` with
    Baton's attention.

    If the model is cut, `sum_up` is Collective.sum_up: it adds up the ranks' outputs of attention and MLP.
    """

    sum_up: Callable[[Tensor], None] | None = None

    def __init__(self, layer: Any, kernels: LayerKernels) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._kernels = kernels
        self._layer: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._how = layer_attention(attention)
        parts = [linear_of(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
        self._num_heads = [part.out_features // self._head_dim for part in parts]
        self._qkv, self._out = joined(parts), linear_of(attention, "o_proj")
        self._gate_up = joined([linear_of(mlp, "gate_proj"), linear_of(mlp, "up_proj")])
        self._down = linear_of(mlp, "down_proj")
        self._down_bias: Tensor | None = self._down.bias
        self._input_norm = Norm(*norm_parts(layer.input_layernorm))
        self._mlp_norm = Norm(*norm_parts(layer.post_attention_layernorm))
        self._head_norms = None
        if hasattr(attention, "q_norm"):
            self._head_norms = Norm(*norm_parts(attention.q_norm)), Norm(*norm_parts(attention.k_norm))

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_plan: AttentionPlan,
        **_: Any,
    ) -> Tensor:
        """Computes the layer without changing `hidden_states`.

        Shapes: hidden_states and the result [1, T, hidden]; position_embeddings, cosines and sines, [1, T, head_dim]
        each.
        """
        states = hidden_states[0]
        compute = self._one if states.shape[0] == 1 else self._many
        cosines, sines = position_embeddings
        return compute(states, (cosines[0], sines[0]), attention_plan).unsqueeze(0)

    def _one(self, states: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        times = self._kernels.multiplied
        heads = times(states, self._qkv.weight, self._qkv.bias, norm=self._input_norm)
        attended = self._attend(heads, rotation, plan)
        if self.sum_up is None:
            states = times(attended, self._out.weight, self._out.bias, added=states)
        else:
            states = self._summed(times(attended, self._out.weight, self._out.bias)).add_(states)
        gated = times(states, self._gate_up.weight, self._gate_up.bias, norm=self._mlp_norm, is_gated=True)
        if self.sum_up is None:
            return times(gated, self._down.weight, self._down_bias, added=states)
        return self._summed(times(gated, self._down.weight, self._down_bias)).add_(states)

    def _many(self, states: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        attended = self._attend(self._qkv(self._kernels.normed(states, self._input_norm)), rotation, plan)
        states, normed = self._kernels.added_and_normed(states, self._summed(self._out(attended)), self._mlp_norm)
        gated = self._kernels.gated(self._gate_up(normed))
        if self.sum_up is not None:
            return states.add_(self._summed(linear(gated, self._down.weight, self._down_bias)))
        states.addmm_(gated, self._down.weight.T)
        return states if self._down_bias is None else states.add_(self._down_bias)

    def _summed(self, output: Tensor) -> Tensor:
        if self.sum_up is not None:
            self.sum_up(output)
        return output

    def _attend(self, joined_heads: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        heads = joined_heads.unflatten(-1, (-1, self._head_dim))
        num_queries, num_keys, _ = self._num_heads
        self._kernels.rotate(
            heads, rotation, num_query_heads=num_queries, num_key_heads=num_keys, norms=self._head_norms
        )
        query, key, value = heads.split(self._num_heads, dim=1)
        return plan.attend(self._layer, query, key, value, self._how).flatten(1)


class GpuRMSNorm(nn.Module):
    """An RMS norm in one kernel, made from `norm`, whose class is one of NORMS. Both round in the same way."""

    def __init__(self, norm: nn.Module, kernels: LayerKernels) -> None:
        super().__init__()
        self._norm = Norm(*norm_parts(norm))
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.normed(x.reshape(-1, x.shape[-1]), self._norm).view(x.shape)


class GpuLinear(nn.Linear):
    """A linear layer that shares the weight of `layer`. For a single token it runs a kernel of Baton's, and for several
    tokens PyTorch's operator.
    """

    def __init__(self, layer: nn.Linear, kernels: LayerKernels) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() != self.in_features:
            return linear(x, self.weight, self.bias)
        one = self._kernels.multiplied(x.reshape(1, -1), self.weight, self.bias)
        return one.view(*x.shape[:-1], self.out_features)


@torch.inference_mode()
def fuse_layers(model: nn.Module, kernels: LayerKernels) -> int:
    """Replaces the known decoder layers of `model`, its other known norms, and its output head, by fused ones.

    Returns the number of replaced decoder layers. The original weights are freed layer by layer.
    """
    trusted: dict[type[nn.Module], bool] = {}

    def fused(module: nn.Module) -> nn.Module | None:
        if type(module) in NORMS:
            return GpuRMSNorm(module, kernels)
        if type(module) not in LAYERS or not _is_known(module):
            return None
        if type(module) not in trusted:
            trusted[type(module)] = _agrees(module, kernels)
        _give_back_memory(module)  # frees the previous layer's
        return GpuDecoderLayer(module, kernels) if trusted[type(module)] else None

    replace_modules(model, fused)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is nn.Linear:
        replace_modules(model, lambda module: GpuLinear(head, kernels) if module is head else None)
    return sum(isinstance(module, GpuDecoderLayer) for module in model.modules())


def _is_known(layer: Any) -> bool:
    attention, norms = layer.self_attn, [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return (
        type(attention) in ATTENTIONS
        and type(layer.mlp) in MLPS
        and all(type(norm) in NORMS for norm in norms)
        and is_plain(layer)
        and len({(weight.dtype, weight.device) for weight in layer.parameters()}) == 1
    )


def _agrees(layer: nn.Module, kernels: LayerKernels) -> bool:
    wide = copy.deepcopy(layer).float()
    matmul = torch.backends.cuda.matmul
    allowed, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        return layer_agrees(wide, GpuDecoderLayer(wide, kernels))
    finally:
        matmul.allow_tf32 = allowed


def _give_back_memory(module: nn.Module) -> None:
    if next(module.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()
