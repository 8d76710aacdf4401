"""Translates a decoder-only model of transformers into a program: a list of operations that the kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
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

from baton_cpu.blocks.decoder_blocks import PackedAttention, PackedGatedMLP
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
from baton_cpu.program.shared_weights import Holder, SharedWeights
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
_HEADS, _GATED_MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
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

    The model's blocks, norms and linear layers may be replaced (see decoder_blocks.py) before the function is called.
    It makes the linear layers share the program's weights, and the program shares embedding and norms. Packed experts
    are copies; the model keeps its own. If the function raises, the linear layers have weights of their own again, as
    far as there is room, unless `check` keeps raising.
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
    """A layer of the model, and its tensors besides the linear layers' weights. `head_biases` are the biases of q, k
    and v (empty if there are none). `gate_norm` is the norm before the MLP. `query_norm` and `key_norm` have the length
    of one head or of all heads together. `experts` is None if the layer has a gated MLP, whose gate has `gated_size`
    outputs.
    """

    layer: Any
    head_biases: tuple[Tensor, ...]
    experts: Experts | None
    gated_size: int
    input_norm: Tensor
    gate_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None

    @property
    def experts_bytes(self) -> int:
        experts = self.experts
        return 0 if experts is None else experts.router.nbytes + experts.gate_up.nbytes + experts.down.nbytes

    def heads(self) -> list[Holder]:
        """Returns the linear layers of q, k and v: one joined layer, or three."""
        block = self.layer.self_attn
        return _holders(block, "qkv") if isinstance(block, PackedAttention) else _holders(block, *_HEADS)

    def out(self) -> list[Holder]:
        block = self.layer.self_attn
        return _holders(block, "out" if isinstance(block, PackedAttention) else "o_proj")

    def gated_mlp(self) -> list[Holder]:
        """Returns the linear layers gate, up and down."""
        block = self.layer.mlp
        return _holders(block, *(("gate", "up", "down") if isinstance(block, PackedGatedMLP) else _GATED_MLP))


@dataclass(frozen=True, slots=True)
class _ModelParts:
    """The parts of a model that a program is made of. `largest_bytes` is the size of the largest weight that is packed
    at once.
    """

    embedding: Tensor
    layers: Sequence[_LayerParts]
    attention: AttentionSize
    norm: Tensor
    head: list[Holder]
    vocab_size: int
    epsilon: float
    largest_bytes: int

    @property
    def needed_bytes(self) -> int:
        """The memory in bytes that packing needs: for the experts, and for two more copies of the largest weight."""
        return sum(layer.experts_bytes for layer in self.layers) + 2 * self.largest_bytes


def _parts(model: nn.Module) -> _ModelParts:
    base, config = _base(model), _config(model)
    head: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    layers = tuple(map(_layer_parts, base.layers))
    gated = max(layer.gated_size for layer in layers) * 2 * head.shape[1] * head.itemsize
    return _ModelParts(
        embedding=base.embed_tokens.weight.detach(),
        layers=layers,
        attention=_attention_size(base.layers[0].self_attn),
        norm=base.norm.weight.detach(),
        head=_holders(model, "lm_head"),
        vocab_size=head.shape[0],
        epsilon=float(config.rms_norm_eps),
        largest_bytes=max(head.nbytes, gated),
    )


def _layer_parts(layer: Any) -> _LayerParts:
    attention = layer.self_attn
    heads = [getattr(attention, name) for name in _HEADS]
    experts = _experts(layer.mlp)
    return _LayerParts(
        layer=layer,
        head_biases=tuple(part.bias.detach() for part in heads if part.bias is not None),
        experts=experts,
        gated_size=layer.mlp.gate_proj.out_features if experts is None else 1,
        input_norm=layer.input_layernorm.weight.detach(),
        gate_norm=layer.post_attention_layernorm.weight.detach(),
        query_norm=_weight(attention, "q_norm"),
        key_norm=_weight(attention, "k_norm"),
    )


def _holders(module: nn.Module, *names: str) -> list[Holder]:
    return [Holder(module, name) for name in names]


def _experts(mlp: Any) -> Experts | None:
    if type(mlp) not in _OF_EXPERTS:
        return None
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
    experts = _experts(mlp)
    return mlp.down_proj.in_features if experts is None else experts.down.shape[-1]


@torch.no_grad()
def _write(parts: _ModelParts, rope: nn.Module, check: Callable[[], None], *, num_positions: int) -> FusedDecoder:
    require_room(parts.needed_bytes)  # raises before memory is taken that others need
    shared = SharedWeights()
    with ExitStack() as undo:  # unless all goes well
        undo.callback(shared.end, check)
        program = _program(parts, shared, check)
        decoder = FusedDecoder(program, *rotation(rope, parts.embedding.dtype, num_positions), shared.end)
        undo.pop_all()
    return decoder


def _program(parts: _ModelParts, shared: SharedWeights, check: Callable[[], None]) -> Program:
    hidden_size = parts.embedding.shape[1]
    size, epsilon = parts.attention, parts.epsilon
    builder = ProgramBuilder(parts.embedding.dtype, check)
    logits = builder.buffer(parts.vocab_size, is_float=True)
    states, stream = builder.buffer(1), builder.buffer(hidden_size)
    assert (logits, states, stream) == (LOGITS, STATES, STREAM)
    heads = builder.buffer((size.num_heads + 2 * size.num_kv_heads) * size.head_dim)
    starts = (0, size.num_heads * size.head_dim)  # of queries and keys
    attended = builder.buffer(size.num_heads * size.head_dim, is_input=True)
    gated = builder.buffer(max(layer.gated_size for layer in parts.layers), is_input=True)
    builder.embed(parts.embedding, stream)
    for number, layer in enumerate(parts.layers):
        panels = builder.linear(
            stream,
            heads,
            shared.weight_of(layer.heads()),
            bias=torch.cat(layer.head_biases) if layer.head_biases else None,
            norm=layer.input_norm,
            epsilon=epsilon,
            shows_layer=True,
        )
        shared.share(panels, layer.heads())
        norms = [layer.query_norm, layer.key_norm]
        for place, norm in enumerate(norms):
            if norm is not None and norm.shape[0] != size.head_dim:  # of all heads together
                builder.norm(heads, heads, norm, epsilon=epsilon, source_offset=starts[place], offset=starts[place])
                norms[place] = None
        query_norm, key_norm = norms
        builder.attend(heads, attended, size, layer=number, query_norm=query_norm, key_norm=key_norm, epsilon=epsilon)
        panels = builder.linear(attended, stream, shared.weight_of(layer.out()), store=Store.ADD)
        shared.share(panels, layer.out())
        if layer.experts is not None:
            builder.experts(stream, layer.experts, norm=layer.gate_norm, epsilon=epsilon)
            continue
        gate, up, down = layer.gated_mlp()
        both = (shared.weight_of([gate]), shared.weight_of([up]))
        panels = builder.gate(stream, gated, *both, norm=layer.gate_norm, epsilon=epsilon)
        del both
        shared.share_pair(panels, gate, up)
        shared.share(builder.linear(gated, stream, shared.weight_of([down]), store=Store.ADD), [down])
    panels = builder.linear(
        stream,
        logits,
        shared.weight_of(parts.head),
        norm=parts.norm,
        epsilon=epsilon,
        store=Store.LOGITS,
        selected_rows=True,
    )
    shared.share(panels, parts.head)
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
    return [getattr(block, name) for block in attentions for name in _HEADS]


def _weight(module: Any, name: str) -> Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm.weight.detach()


def _base(model: nn.Module) -> Any:
    return model.base_model


def _config(model: nn.Module) -> Any:
    return model.config
