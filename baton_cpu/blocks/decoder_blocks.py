"""Blocks of decoder layers for CPUs, computed by fewer kernels than their parts would take.

    attention   q, k, v of one linear layer ─▶ (norms) ─▶ rotation ─▶ attention_plan ─▶ out
    gated MLP   down(silu(gate(x)) * up(x)), activation and product inside the linear layers' kernels

`common.model.blocks` lists the block classes that can be replaced, and checks that a replacement computes the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from baton_cpu.blocks.linear import PackedLinear, can_pack
from baton_cpu.blocks.rotation import rotated
from common.attention.backend import AttentionPlan
from common.host.memory import return_freed_memory
from common.model.blocks import ATTENTIONS, MLPS, attention_agrees, joined, layer_attention, linear_of, mlp_agrees
from common.model.replace import replace_modules


class PackedAttention(nn.Module):
    """Computes what the attention block `block` does, from packed weights (see PackedLinear). Attention reads and
    writes the KV pool, through the `attention_plan` that `forward` gets.

    `block` is an instance of one of the classes in ATTENTIONS.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._layer: int = block.layer_idx  # type: ignore[assignment]
        self._head_dim: int = block.head_dim  # type: ignore[assignment]
        self._how = layer_attention(block)
        parts = [linear_of(block, name) for name in ("q_proj", "k_proj", "v_proj")]
        self._num_heads = [part.out_features // self._head_dim for part in parts]
        self.qkv = PackedLinear(joined(parts))
        self.out = PackedLinear(linear_of(block, "o_proj"))
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
        """Returns the block's output [1, T, hidden], and None for the attention weights, which transformers expects.

        `attention_plan` computes attention for this forward and writes KV to the pool. Shapes: hidden_states [1, T,
        hidden]; position_embeddings: cosines and sines, each [1, T, head_dim]. Other arguments are ignored.
        """
        heads = self.qkv(hidden_states)[0].unflatten(-1, (-1, self._head_dim))
        query, key, value = heads.split(self._num_heads, dim=1)
        if self._q_norm is not None:
            query = self._q_norm(query)
        if self._k_norm is not None:
            key = self._k_norm(key)
        query, key = rotated(query, position_embeddings), rotated(key, position_embeddings)
        attended = attention_plan.attend(self._layer, query, key, value, self._how)
        return self.out(attended.flatten(1).unsqueeze(0)), None


class PackedGatedMLP(nn.Module):
    """Computes what the gated MLP `block` does, from packed weights (see PackedLinear).

    `block` is an instance of one of the classes in MLPS, with SiLU as its activation.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            PackedLinear(linear_of(block, name)) for name in ("gate_proj", "up_proj", "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up.times(self.gate.silu(x), x))
        return output


def fuse_blocks(model: nn.Module) -> int:
    """Replaces attention and MLP blocks of `model`, which is on a CPU, by packed ones that compute the same. Returns
    how many were replaced.

    A block is replaced if its class is in ATTENTIONS or MLPS, all its linear layers can be packed, and a block of that
    class computes in float32 what its replacement computes.
    """
    trusted: dict[type[nn.Module], bool] = {}  # by class: others differ in weights and windows

    def fused(block: nn.Module) -> nn.Module | None:
        kind = type(block)
        replacement: type[PackedAttention] | type[PackedGatedMLP]
        agrees: Callable[[nn.Module, nn.Module], bool]
        if kind in ATTENTIONS:
            replacement, agrees = PackedAttention, attention_agrees
        elif kind in MLPS:
            replacement, agrees = PackedGatedMLP, mlp_agrees
        else:
            return None
        linears = [child for child in block.children() if isinstance(child, nn.Linear)]
        if not all(type(linear) is nn.Linear and can_pack(linear.weight) for linear in linears):
            return None
        if kind not in trusted:
            wide = copy.deepcopy(block).float()
            trusted[kind] = agrees(wide, replacement(wide))
        return_freed_memory()  # of the block before
        return replacement(block) if trusted[kind] else None

    return replace_modules(model, fused)
