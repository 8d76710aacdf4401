"""From a model directory to a TargetModel."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import UnsupportedModel
from common.kv.layer_group import LayerGroupSpec
from common.model.attention import ATTENTION_NAME
from common.model.attention_choice import AttentionKind, new_attention
from common.model.cpu_linear import pack_linears
from common.model.end_tokens import end_token_ids, read_end_tokens
from common.model.forward_program import NewDecoder
from common.model.target import TargetModel
from common.model.traits import PROBE_NAME, check_config, probe_attention
from common.wire.handoff import TARGET_GROUP

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_target(
    directory: Path,
    *,
    device: str,
    dtype: str,
    attention: AttentionKind = "kernels",
    fuses: bool = False,
    optimizes_modules: bool = True,
) -> TargetModel:
    """The model in `directory`, with weights in `dtype` (a key of DTYPES) on `device`. On a CPU, and where its class is
    known: `fuses`, also ready to be written down as a program; `optimizes_modules`, with fewer and larger modules.

    Raises UnsupportedModel, naming the trait, for a model that is not decoder-only with full causal attention.
    """
    end_tokens = read_end_tokens(directory)
    config = _load_config(directory)
    check_config(config, name=directory.name)
    eos_token_ids = end_token_ids(directory, end_tokens, vocab_size=config.vocab_size)
    model = _load_model(directory, config, DTYPES[dtype])
    return target_of(
        model,
        name=directory.name,
        device=device,
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        attention=attention,
        fuses=fuses,
        optimizes_modules=optimizes_modules,
    )


def target_of(
    model: Any,
    *,
    name: str,
    device: str,
    dtype: str,
    eos_token_ids: tuple[int, ...] = (),
    attention: AttentionKind = "kernels",
    fuses: bool = False,
    optimizes_modules: bool = True,
) -> TargetModel:
    """A loaded causal language model as a target; it is changed, and attends nowhere else any more.

    Raises UnsupportedModel, like `load_target`, for what only a forward shows.
    """
    torch_device, config = torch.device(device), model.config
    model = model.to(torch_device).eval().requires_grad_(False)
    shape = probe_attention(model, name=name, torch_device=torch_device)
    model.set_attn_implementation(ATTENTION_NAME)
    new_decoder = None
    if torch_device.type == "cpu":
        new_decoder = _new_decoder(model) if fuses else None
        if optimizes_modules:
            _use_cpu_kernels(model)
    return TargetModel(
        model=model,
        backend=new_attention(
            attention,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=DTYPES[dtype],
            torch_device=torch_device,
        ),
        layer_group=LayerGroupSpec(
            name=TARGET_GROUP,
            num_layers=shape.num_layers,
            num_planes=2,
            num_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
        ),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        dtype=DTYPES[dtype],
        torch_device=torch_device,
        new_decoder=new_decoder,
    )


def _new_decoder(model: nn.Module) -> NewDecoder | None:
    from common.model.fused.decoder import can_fuse, decoder_of  # as below

    return decoder_of(model) if can_fuse(model) else None


@torch.inference_mode()
def _use_cpu_kernels(model: nn.Module) -> None:
    from common.model.cpu_blocks import fuse_blocks  # the compiler behind these is of no use elsewhere
    from common.model.cpu_norm import replace_norms

    fuse_blocks(model)
    replace_norms(model)
    pack_linears(model)


def _load_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{directory.name}: no configuration that transformers knows: {error}") from error


def _load_model(directory: Path, config: Any, dtype: torch.dtype) -> Any:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(directory), config=config, dtype=dtype, attn_implementation=PROBE_NAME
        )
    except KeyError as error:
        if error.args != (PROBE_NAME,):
            raise
        raise UnsupportedModel(
            f"{directory.name}: attention outside transformers' attention interface is not supported"
        ) from error
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{directory.name}: an architecture that cannot select logits is not supported")
    return model
