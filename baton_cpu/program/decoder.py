"""Translates a decoder-only model of transformers into a program: a list of operations that the kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from baton_cpu.program.builder import LOGITS, STATES, STREAM, AttentionSize, FusedDecoder, Program, ProgramBuilder
from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from baton_cpu.program.kernel.numbers import DTYPES
from baton_cpu.program.kernel.operations import Store
from baton_cpu.program.weights import step_of
from common.attention.backend import LayerAttention
from common.host.memory import require_room
from common.model.blocks import layer_attention
from common.model.forward_program import NewProgram

_MAX_POSITIONS = 131_072  # 64 MB of cosines and sines at a head_dim of 128 in bfloat16
_MORE_POSITIONS = 64  # for drafts past the model's last position
_KNOWN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


def can_fuse(model: nn.Module) -> bool:
    """Returns whether `decoder_of` can translate `model`: whether it knows the model's class, dtype and sizes. Only a
    comparison of both shows whether the program computes what the model does.
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
        and all(_attends_all(layer.self_attn) for layer in _base(model).layers)
    )


def decoder_of(model: nn.Module) -> NewProgram:
    """Returns a function that translates `model` into a program, a FusedDecoder. `can_fuse(model)` must be true. The
    function takes a `check`, which is called between parts of the work and may raise.

    The function uses the weights that the model has now, so the model's modules may be replaced before it is called.
    The program has packed weights of its own, and shares the embedding and the norms.
    """
    base = _base(model)
    return partial(_write, _parts(model), base.rotary_emb, num_positions=_config(model).max_position_embeddings)


def rotation(rope: nn.Module, dtype: torch.dtype, num_positions: int) -> tuple[Tensor, Tensor]:
    """Returns rotary tables for `num_positions` positions and some more, which drafts may reach, but not for more than
    _MAX_POSITIONS: cosines and sines, each [positions, head_dim] of `dtype`. `rope` is the rotary embedding module of
    transformers.
    """
    positions = torch.arange(min(num_positions + _MORE_POSITIONS, _MAX_POSITIONS))
    cosines, sines = rope(torch.zeros((1, 1, 1), dtype=dtype), positions.unsqueeze(0))
    return cosines[0].contiguous(), sines[0].contiguous()


@dataclass(frozen=True, slots=True)
class _LayerParts:
    """The weights of one layer. `heads` are the weights of q, k and v, and `head_biases` their biases (empty if there
    are none). `gate_norm` is the norm before the MLP, and `out` the output projection of the attention.
    """

    heads: tuple[Tensor, ...]
    head_biases: tuple[Tensor, ...]
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    input_norm: Tensor
    gate_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None

    @property
    def packed_bytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.heads, self.out, self.gate, self.up, self.down))


@dataclass(frozen=True, slots=True)
class _Parts:
    """The weights of a model, held independently of its modules."""

    embedding: Tensor
    layers: Sequence[_LayerParts]
    attention: AttentionSize
    norm: Tensor
    head: Tensor
    epsilon: float

    @property
    def needed_bytes(self) -> int:
        """The memory in bytes that packing needs: the packed weights, and a layer's gate and up weights joined for a
        moment.
        """
        packed = self.head.nbytes + sum(layer.packed_bytes for layer in self.layers)
        return packed + max(layer.gate.nbytes + layer.up.nbytes for layer in self.layers)


def _parts(model: nn.Module) -> _Parts:
    base, config = _base(model), _config(model)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    return _Parts(
        embedding=base.embed_tokens.weight.detach(),
        layers=tuple(map(_layer_parts, base.layers)),
        attention=_attention_size(base.layers[0].self_attn),
        norm=base.norm.weight.detach(),
        head=head.weight.detach(),
        epsilon=float(config.rms_norm_eps),
    )


def _layer_parts(layer: Any) -> _LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    heads = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _LayerParts(
        heads=tuple(part.weight.detach() for part in heads),
        head_biases=tuple(part.bias.detach() for part in heads if part.bias is not None),
        out=attention.o_proj.weight.detach(),
        gate=mlp.gate_proj.weight.detach(),
        up=mlp.up_proj.weight.detach(),
        down=mlp.down_proj.weight.detach(),
        input_norm=layer.input_layernorm.weight.detach(),
        gate_norm=layer.post_attention_layernorm.weight.detach(),
        query_norm=_weight(attention, "q_norm"),
        key_norm=_weight(attention, "k_norm"),
    )


@torch.no_grad()
def _write(parts: _Parts, rope: nn.Module, check: Callable[[], None], *, num_positions: int) -> FusedDecoder:
    require_room(parts.needed_bytes)  # raises before memory is taken that others need
    return FusedDecoder(_program(parts, check), *rotation(rope, parts.embedding.dtype, num_positions))


def _program(parts: _Parts, check: Callable[[], None]) -> Program:
    vocab_size, hidden_size = parts.head.shape
    size, epsilon = parts.attention, parts.epsilon
    builder = ProgramBuilder(parts.head.dtype, check)
    logits = builder.buffer(vocab_size, is_float=True)
    states, stream = builder.buffer(1), builder.buffer(hidden_size)
    assert (logits, states, stream) == (LOGITS, STATES, STREAM)
    heads = builder.buffer((size.num_heads + 2 * size.num_kv_heads) * size.head_dim)
    attended = builder.buffer(size.num_heads * size.head_dim, is_input=True)
    gated = builder.buffer(parts.layers[0].gate.shape[0], is_input=True)
    builder.embed(parts.embedding, stream)
    for number, layer in enumerate(parts.layers):
        builder.linear(
            stream,
            heads,
            torch.cat(layer.heads),
            bias=torch.cat(layer.head_biases) if layer.head_biases else None,
            norm=layer.input_norm,
            epsilon=epsilon,
            shows_layer=True,
        )
        builder.attend(
            heads,
            attended,
            size,
            layer=number,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            epsilon=epsilon,
        )
        builder.linear(attended, stream, layer.out, store=Store.ADD)
        builder.gate(stream, gated, layer.gate, layer.up, norm=layer.gate_norm, epsilon=epsilon)
        builder.linear(gated, stream, layer.down, store=Store.ADD)
    builder.linear(
        stream,
        logits,
        parts.head,
        norm=parts.norm,
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


def _attends_all(attention: Any) -> bool:
    """Returns whether the attention block attends all earlier tokens, which is what the kernel does."""
    return layer_attention(attention) == LayerAttention(attention.scaling)


def _biased(model: nn.Module) -> Sequence[nn.Module]:
    """Returns the linear layers of `model` that may have a bias in a program: q, k and v."""
    attentions = [layer.self_attn for layer in _base(model).layers]
    return [part for block in attentions for part in (block.q_proj, block.k_proj, block.v_proj)]


def _weight(module: Any, name: str) -> Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm.weight.detach()


def _base(model: nn.Module) -> Any:
    return model.base_model


def _config(model: nn.Module) -> Any:
    return model.config
