"""One transformer layer of a draft head, without the norms of its input."""

from __future__ import annotations

import torch
from torch import Tensor

from common.attention.backend import AttentionPlan, LayerAttention
from common.draft.checkpoint import Checkpoint
from common.draft.kernels import Kernels, Rotation
from common.draft.spec import BlockSpec


class Block:
    """One transformer layer: attention and a gated MLP, each with a residual connection, and a norm between them.

    Its tensors in the checkpoint are `{prefix}self_attn.*`, `{prefix}mlp.*` and `{prefix}{mlp_norm}`. `layer` is the
    number of this layer in the KV of the draft head. `input_size` is the width of the attention's input.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        spec: BlockSpec,
        kernels: Kernels,
        *,
        layer: int,
        input_size: int,
        mlp_norm: str = "post_attention_layernorm",
    ) -> None:
        def linear(name: str, *shape: int, bias: bool = False) -> tuple[Tensor, Tensor | None]:
            weight = checkpoint.take(f"{prefix}{name}.weight", *shape)
            return weight, checkpoint.take(f"{prefix}{name}.bias", shape[0]) if bias else None

        heads_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = [
            linear(f"self_attn.{name}", size, input_size, bias=spec.qkv_bias)
            for name, size in (("q_proj", heads_size), ("k_proj", kv_size), ("v_proj", kv_size))
        ]
        biases = [bias for _, bias in parts if bias is not None]
        self._qkv = kernels.linear(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None)
        self._out = kernels.linear(*linear("self_attn.o_proj", spec.hidden_size, heads_size, bias=spec.out_bias))
        self._norm = kernels.norm(checkpoint.take(f"{prefix}{mlp_norm}.weight", spec.hidden_size), spec.norm_epsilon)
        wide, narrow = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
        shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
        self._mlp = kernels.gated_mlp(*(linear(f"mlp.{name}", *shape)[0] for name, shape in shapes.items()))
        self._rotated = kernels.rotated
        self._layer = layer
        self._num_heads, self._num_kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._how = LayerAttention(spec.head_dim**-0.5)

    def __call__(self, x: Tensor, residual: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """Computes r = residual + attention(x), and returns r + mlp(norm(r)), [T, hidden_size].

        Shapes: `x` [T, input_size], which is already normed; `residual` [T, hidden_size].
        """
        num_rotated = self._num_heads + self._num_kv_heads
        heads = self._qkv(x).unflatten(-1, (-1, self._head_dim))
        rotated = self._rotated(heads[:, :num_rotated], rotation)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        attended = plan.attend(self._layer, query, key, heads[:, num_rotated:], self._how)
        residual = residual + self._out(attended.flatten(1))
        return residual + self._mlp(self._norm(residual))
