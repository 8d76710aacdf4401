"""Translates an EAGLE-3 draft head into two programs: one reads the states that the target captured, the other the
head's own outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton_cpu.program.builder import LOGITS, STATES, STREAM, AttentionSize, FusedDecoder, Program, ProgramBuilder
from baton_cpu.program.decoder import rotation
from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from baton_cpu.program.kernel.numbers import DTYPES
from baton_cpu.program.kernel.operations import Store
from baton_cpu.program.weights import step_of
from common.draft.checkpoint import Checkpoint
from common.draft.spec import Eagle3Spec
from common.host.memory import require_room
from common.model.forward_program import NewProgram
from common.model.target import TargetModel

_OUTPUT, _INPUT = STATES, STREAM
"""Buffers of a head's programs. _OUTPUT holds the head's residual stream and, at the end, what the head returns. _INPUT
holds the states that it reads beside the tokens.
"""


@dataclass(frozen=True, slots=True)
class HeadPrograms:
    """The programs of a one-layer draft head, one for each of its methods `extend` and `step`. `extend` reads the
    states that the target captured; `step` reads the head's own outputs.
    """

    extend: FusedDecoder
    step: FusedDecoder


def programs_of(checkpoint: Checkpoint, spec: Eagle3Spec, target: TargetModel) -> NewProgram | None:
    """Returns a function that translates the head in `checkpoint` into HeadPrograms, or None if kernels cannot run it.
    The function takes a `check`, which is called between parts of the work and may raise. The tensors in `checkpoint`
    must fit `spec` and `target`.

    Kernels cannot run heads of unsupported dtype or sizes, heads that normalise each captured state by itself, or heads
    that use the target's output head.
    """
    block, dtype = spec.block, target.dtype
    widths = (block.hidden_size, spec.target_hidden_size, block.intermediate_size, block.num_heads * block.head_dim)
    has_output_head = "lm_head.weight" in checkpoint or (spec.tied_head and "embed_tokens.weight" in checkpoint)
    if (
        dtype not in DTYPES
        or target.torch_device.type != "cpu"
        or any(width % step_of(dtype) for width in widths)
        or block.intermediate_size % (PANEL_WIDTH // 2)
        or spec.fc_norm
        or not has_output_head
    ):
        return None
    return partial(_write, checkpoint, spec, target)


@torch.no_grad()
def _write(checkpoint: Checkpoint, spec: Eagle3Spec, target: TargetModel, check: Callable[[], None]) -> HeadPrograms:
    require_room(checkpoint.num_bytes)  # raises before memory is taken that others need
    tables = rotation(LlamaRotaryEmbedding(spec.block.rope), target.dtype, target.max_context_tokens)
    table: Tensor = target.input_embeddings.weight.detach()  # type: ignore[operator]
    extend, step = _programs(checkpoint.untaken(), spec, table, ProgramBuilder(target.dtype, check))
    return HeadPrograms(FusedDecoder(extend, *tables), FusedDecoder(step, *tables))


def _programs(
    checkpoint: Checkpoint, spec: Eagle3Spec, embedding: Tensor, builder: ProgramBuilder
) -> tuple[Program, Program]:
    """Builds the programs `extend` and `step` with the empty `builder`, and returns them in this order. They have the
    same weights, and differ in their first operations. `embedding` is the target's; it is used if the checkpoint has
    none.
    """
    block, size, epsilon = spec.block, spec.block.hidden_size, spec.block.norm_epsilon
    prefix = "midlayer." if checkpoint.has_prefix("midlayer.") else "layers.0."
    heads_size, kv_size = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    captured_size = len(spec.captured_layers) * spec.target_hidden_size

    def weight(name: str, *shape: int) -> Tensor:
        return checkpoint.take(f"{name}.weight", *shape)

    def bias(name: str, width: int, *, is_there: bool) -> Tensor | None:
        return checkpoint.take(f"{name}.bias", width) if is_there else None

    logits = builder.buffer(spec.draft_vocab_size, is_float=True)
    output, given = builder.buffer(size), builder.buffer(captured_size)
    assert (logits, output, given) == (LOGITS, _OUTPUT, _INPUT)
    both, heads = builder.buffer(2 * size), builder.buffer(heads_size + 2 * kv_size)
    attended = builder.buffer(heads_size, is_input=True)
    gated = builder.buffer(block.intermediate_size, is_input=True)

    captured = given
    if spec.norm_before_fc:
        captured = builder.buffer(captured_size)
        builder.norm(given, captured, weight("input_norm", captured_size), epsilon=epsilon)
    fc_bias = bias("fc", size, is_there=spec.fc_bias)
    builder.linear(captured, output, weight("fc", size, captured_size), bias=fc_bias)
    num_fusing = builder.num_operations
    builder.copy(given, output, width=size)

    hidden_norm = weight(f"{prefix}hidden_norm", size)
    if spec.norm_before_residual:
        builder.norm(output, output, hidden_norm, epsilon=epsilon)
        builder.copy(output, both, width=size, offset=size)
    else:
        builder.norm(output, both, hidden_norm, epsilon=epsilon, offset=size)
    own_embedding = checkpoint.take_if_there("embed_tokens.weight", spec.vocab_size, size)
    builder.embed(embedding if own_embedding is None else own_embedding, both)
    builder.norm(both, both, weight(f"{prefix}input_layernorm", size), epsilon=epsilon)
    parts = [(f"{prefix}self_attn.{name}_proj", heads_size if name == "q" else kv_size) for name in "qkv"]
    biases = [checkpoint.take(f"{name}.bias", width) for name, width in parts] if block.qkv_bias else []
    builder.linear(
        both,
        heads,
        torch.cat([weight(name, width, 2 * size) for name, width in parts]),
        bias=torch.cat(biases) if biases else None,
    )
    attention = AttentionSize(block.num_heads, block.num_kv_heads, block.head_dim, block.head_dim**-0.5)
    builder.attend(heads, attended, attention, layer=0)
    out = f"{prefix}self_attn.o_proj"
    out_bias = bias(out, size, is_there=block.out_bias)
    builder.linear(attended, output, weight(out, size, heads_size), bias=out_bias, store=Store.ADD)
    gate, up = (weight(f"{prefix}mlp.{name}_proj", block.intermediate_size, size) for name in ("gate", "up"))
    builder.gate(output, gated, gate, up, norm=weight(f"{prefix}post_attention_layernorm", size), epsilon=epsilon)
    builder.linear(gated, output, weight(f"{prefix}mlp.down_proj", size, block.intermediate_size), store=Store.ADD)
    norm = weight("norm", size)
    if spec.norm_output:
        builder.norm(output, output, norm, epsilon=epsilon)
    head = checkpoint.take_if_there("lm_head.weight", spec.draft_vocab_size, size)
    head = own_embedding if head is None else head
    assert head is not None
    builder.linear(
        output,
        logits,
        head,
        norm=None if spec.norm_output else norm,
        epsilon=epsilon,
        store=Store.LOGITS,
        selected_rows=True,
    )
    every = builder.program()
    step = replace(
        every,
        operations=every.operations[num_fusing:],
        numbers=every.numbers[num_fusing:],
        widths=tuple(size if buffer == _INPUT else width for buffer, width in enumerate(every.widths)),
    )
    extend = replace(
        every,
        operations=np.delete(every.operations, num_fusing, axis=0),
        numbers=np.delete(every.numbers, num_fusing, axis=0),
    )
    return extend, step
