"""A decoder-only model of transformers, written down as a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from common.model.forward_program import AttentionSize, FusedDecoder, Program
from common.model.fused.builder import ProgramBuilder
from common.model.fused.dot_products import PANEL_WIDTH, step_of
from common.model.fused.numbers import DTYPES
from common.model.fused.operations import Store

_MAX_POSITIONS = 131_072  # 64 MB of cosines and sines at a head_dim of 128 in bfloat16
_MORE_POSITIONS = 64  # drafted past the model's last
_KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

LOGITS, STATES, STREAM = 0, 1, 2
"""Buffers of every program: logits [R, vocab] float32, the states it gives out beside them, then one that may come from
outside; of a model's the residual stream, which does not.
"""


def can_fuse(model: nn.Module) -> bool:
    """Whether `fused_decoder` knows the model's class, dtype and sizes. That it computes what the model does is to be
    seen by running both.
    """
    if type(model) not in _KNOWN:
        return False
    config = _config(model)
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return (
        weight.dtype in DTYPES
        and weight.device.type == "cpu"
        and config.hidden_act == "silu"
        and config.intermediate_size % (PANEL_WIDTH // 2) == 0
        and all(type(linear) is nn.Linear and linear.in_features % step_of(weight.dtype) == 0 for linear in linears)
        and all(linear.bias is None for linear in linears if linear not in _biased(model))
    )


@torch.no_grad()
def fused_decoder(model: nn.Module) -> FusedDecoder:
    """`model`, which `can_fuse`, with packed weights of its own; embedding and norms are shared."""
    base, num_positions = _base(model), _config(model).max_position_embeddings
    return FusedDecoder(_program(model), *rotation(base.rotary_emb, base.embed_tokens.weight.dtype, num_positions))


def rotation(rope: nn.Module, dtype: torch.dtype, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim] of a model that has so many positions, and of drafts past them."""
    positions = torch.arange(min(num_positions + _MORE_POSITIONS, _MAX_POSITIONS))
    cosines, sines = rope(torch.zeros((1, 1, 1), dtype=dtype), positions.unsqueeze(0))
    return cosines[0].contiguous(), sines[0].contiguous()


def _program(model: nn.Module) -> Program:
    base = _base(model)
    epsilon = float(_config(model).rms_norm_eps)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    hidden_size, vocab_size = head.in_features, head.out_features
    builder = ProgramBuilder(head.weight.dtype)
    logits = builder.buffer(vocab_size, is_float=True)
    states, stream = builder.buffer(1), builder.buffer(hidden_size)
    assert (logits, states, stream) == (LOGITS, STATES, STREAM)
    size = _attention_size(base.layers[0].self_attn)
    heads = builder.buffer((size.num_heads + 2 * size.num_kv_heads) * size.head_dim)
    attended = builder.buffer(size.num_heads * size.head_dim, is_input=True)
    gated = builder.buffer(base.layers[0].mlp.gate_proj.out_features, is_input=True)
    builder.embed(base.embed_tokens.weight.detach(), stream)
    for number, layer in enumerate(base.layers):
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        builder.linear(
            stream,
            heads,
            torch.cat([part.weight for part in parts]),
            bias=torch.cat([part.bias for part in parts]) if attention.q_proj.bias is not None else None,
            norm=layer.input_layernorm.weight.detach(),
            epsilon=epsilon,
            shows_layer=True,
        )
        builder.attend(
            heads,
            attended,
            size,
            layer=number,
            query_norm=_weight(attention, "q_norm"),
            key_norm=_weight(attention, "k_norm"),
            epsilon=epsilon,
        )
        builder.linear(attended, stream, attention.o_proj.weight.detach(), store=Store.ADD)
        builder.gate(
            stream,
            gated,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            norm=layer.post_attention_layernorm.weight.detach(),
            epsilon=epsilon,
        )
        builder.linear(gated, stream, mlp.down_proj.weight.detach(), store=Store.ADD)
    final: Tensor = base.norm.weight.detach()
    builder.linear(
        stream,
        logits,
        head.weight.detach(),
        norm=final,
        epsilon=epsilon,
        store=Store.LOGITS,
        selected_rows=True,
    )
    builder.largest(logits)
    return builder.program()


def _attention_size(attention: Any) -> AttentionSize:
    return AttentionSize(
        num_heads=attention.q_proj.out_features // attention.head_dim,
        num_kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
    )


def _biased(model: nn.Module) -> Sequence[nn.Module]:
    """The layers whose biases a program can have."""
    attentions = [layer.self_attn for layer in _base(model).layers]
    return [part for block in attentions for part in (block.q_proj, block.k_proj, block.v_proj)]


def _weight(module: Any, name: str) -> Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm.weight.detach()


def _base(model: nn.Module) -> Any:
    return model.base_model


def _config(model: nn.Module) -> Any:
    return model.config
