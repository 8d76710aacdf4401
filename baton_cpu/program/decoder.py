"""Translates a decoder-only model of transformers into a program: a list of operations that the kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from baton_cpu.program.builder import (
    LOGITS,
    STATES,
    STREAM,
    AttentionSize,
    Experts,
    FusedDecoder,
    Program,
    ProgramBuilder,
)
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
_KNOWN = (
    *(LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM),
    *(MixtralForCausalLM, OlmoeForCausalLM, Qwen3MoeForCausalLM),
)
_OF_EXPERTS = (MixtralSparseMoeBlock, OlmoeSparseMoeBlock, Qwen3MoeSparseMoeBlock)


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
        and getattr(config, "clip_qkv", None) is None
        and all(_inner_size(layer.mlp) % (PANEL_WIDTH // 2) == 0 for layer in _base(model).layers)
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
class _Mlp:
    """The weights of a gated MLP."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class _LayerParts:
    """The weights of one layer. `heads` are the weights of q, k and v, and `head_biases` their biases (empty if there
    are none). `gate_norm` is the norm before the MLP, and `out` the output projection of the attention. `query_norm`
    and `key_norm` have the length of one head or of all heads together.
    """

    heads: tuple[Tensor, ...]
    head_biases: tuple[Tensor, ...]
    out: Tensor
    mlp: _Mlp | Experts
    input_norm: Tensor
    gate_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None

    @property
    def packed_bytes(self) -> int:
        mlp = self.mlp
        own = (mlp.gate, mlp.up, mlp.down) if isinstance(mlp, _Mlp) else (mlp.router, mlp.gate_up, mlp.down)
        return sum(weight.nbytes for weight in (*self.heads, self.out, *own))

    @property
    def gated_size(self) -> int:
        """The length of a row between gate and down. Experts have their own rows."""
        return self.mlp.gate.shape[0] if isinstance(self.mlp, _Mlp) else 1

    @property
    def joined_bytes(self) -> int:
        """The bytes of the largest weight that is joined from two before it is packed: gate and up."""
        mlp = self.mlp
        return mlp.gate.nbytes + mlp.up.nbytes if isinstance(mlp, _Mlp) else mlp.gate_up[0].nbytes


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
        """The memory in bytes that packing needs: the packed weights, and gate and up weights joined for a moment."""
        packed = self.head.nbytes + sum(layer.packed_bytes for layer in self.layers)
        return packed + max(layer.joined_bytes for layer in self.layers)


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
    attention = layer.self_attn
    heads = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _LayerParts(
        heads=tuple(part.weight.detach() for part in heads),
        head_biases=tuple(part.bias.detach() for part in heads if part.bias is not None),
        out=attention.o_proj.weight.detach(),
        mlp=_mlp_parts(layer.mlp),
        input_norm=layer.input_layernorm.weight.detach(),
        gate_norm=layer.post_attention_layernorm.weight.detach(),
        query_norm=_weight(attention, "q_norm"),
        key_norm=_weight(attention, "k_norm"),
    )


def _mlp_parts(mlp: Any) -> _Mlp | Experts:
    if type(mlp) not in _OF_EXPERTS:
        return _Mlp(*(part.weight.detach() for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)))
    is_mixtral = type(mlp) is MixtralSparseMoeBlock
    return Experts(
        router=mlp.gate.weight.detach(),
        gate_up=mlp.experts.gate_up_proj.detach(),
        down=mlp.experts.down_proj.detach(),
        num_chosen=mlp.gate.top_k,
        weights_add_up=is_mixtral or mlp.gate.norm_topk_prob,
        rounds_weights=not is_mixtral,
    )


def _inner_size(mlp: Any) -> int:
    """Returns the number of outputs of the gate of an MLP, or of each of its experts."""
    return _mlp_parts(mlp).down.shape[-1]


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
    starts = (0, size.num_heads * size.head_dim)  # of queries and keys
    attended = builder.buffer(size.num_heads * size.head_dim, is_input=True)
    gated = builder.buffer(max(layer.gated_size for layer in parts.layers), is_input=True)
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
        norms = [layer.query_norm, layer.key_norm]
        for place, norm in enumerate(norms):
            if norm is not None and norm.shape[0] != size.head_dim:  # of all heads together
                builder.norm(heads, heads, norm, epsilon=epsilon, source_offset=starts[place], offset=starts[place])
                norms[place] = None
        query_norm, key_norm = norms
        builder.attend(heads, attended, size, layer=number, query_norm=query_norm, key_norm=key_norm, epsilon=epsilon)
        builder.linear(attended, stream, layer.out, store=Store.ADD)
        if isinstance(layer.mlp, Experts):
            builder.experts(stream, layer.mlp, norm=layer.gate_norm, epsilon=epsilon)
        else:
            builder.gate(stream, gated, layer.mlp.gate, layer.mlp.up, norm=layer.gate_norm, epsilon=epsilon)
            builder.linear(gated, stream, layer.mlp.down, store=Store.ADD)
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
