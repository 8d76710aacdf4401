"""Converts a GGUF file's weights to those of transformers' model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

from common.gguf.config import RefusedFile, read_values
from common.gguf.tokenizer import SpecialTokens

_ROTATED = re.compile(r"\.self_attn\.(q|k)_proj\.(weight|bias)$")
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?$")
_ADDED_TO_ONE = ("gemma2", "gemma3")
"""Architectures whose norms multiply by 1 plus their weight. llama.cpp's converter stores the sum."""

_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


def write_model(
    stored: Mapping[str, gguf.ReaderTensor],
    fields: Mapping[str, Any],
    special: SpecialTokens,
    out_dir: Path,
    *,
    architecture: str,
    dtype: torch.dtype,
) -> None:
    """Writes config, generation config and safetensors of the model with these config `fields` into `out_dir`.

    The ids in `special` go into both configs. `architecture` is the file's name for the model's architecture. Raises
    RefusedFile unless the model's parameters are exactly the tensors in `stored`.
    """
    config = transformers.AutoConfig.for_model(
        **fields,
        bos_token_id=special.bos,
        pad_token_id=special.padding,
        eos_token_id=special.ends[0] if special.ends else None,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(_weights(model, stored, architecture, dtype), assign=True)
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=special.bos, pad_token_id=special.padding, eos_token_id=list(special.ends) or None
    )
    model.save_pretrained(str(out_dir))


def _weights(
    model: Any, stored: Mapping[str, gguf.ReaderTensor], architecture: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the model's parameters by name. Raises RefusedFile if the file lacks a parameter or has additional
    tensors.
    """
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys)
    left = dict(stored)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        if name in tied:
            continue
        parts = []
        for source in _sources(name, names):
            if source not in left:
                raise RefusedFile(f"the tensor {source} is missing")
            parts.append(torch.from_numpy(read_values(left.pop(source))))
            if parts[-1].shape != parts[0].shape:
                raise RefusedFile(f"the tensor {source} has the shape {list(parts[-1].shape)}, its like another")
        weight = _as_computed(name, parts, model.config, architecture)
        if weight.shape != parameter.shape:
            shapes = f"{list(weight.shape)}, where its keys want {list(parameter.shape)}"
            raise RefusedFile(f"the tensor {source} has the shape {shapes}")
        weights[name] = weight.to(dtype)
        if not weights[name].isfinite().all():
            raise RefusedFile(f"the tensor {source} has numbers that are not finite in {str(dtype).split('.')[-1]}")
    if left:
        raise RefusedFile(f"the tensor {next(iter(left))} is not supported")
    return weights | {name: weights[model.all_tied_weights_keys[name]] for name in tied}


def _sources(name: str, names: gguf.TensorNameMap) -> list[str]:
    """Returns the names of the file's tensors that make up the parameter `name`, in order.

    Raises RefusedFile if GGUF has no tensor for it.
    """
    if experts := _EXPERTS.match(name):
        return [
            f"blk.{experts[1]}.ffn_{part}_exps.{'bias' if experts[3] else 'weight'}" for part in experts[2].split("_")
        ]
    stem, kind = (name, "weight") if name.endswith(".sinks") else name.rsplit(".", 1)
    base = names.get_name(stem)
    if base is None:
        raise RefusedFile(f"the file has no place for {name}")
    return [f"{base}.{kind}"]


def _as_computed(name: str, parts: Sequence[Tensor], config: Any, architecture: str) -> Tensor:
    """Converts a weight, which transformers calls `name`, from llama.cpp's layout to that of transformers.

    `parts` are the file's tensors that make it up, of one shape.
    """
    if architecture == "gpt-oss" and (experts := _EXPERTS.match(name)):
        if parts[0].dim() != (2 if experts[3] else 3):
            return parts[0]  # a wrong shape is refused later
        # transformers keeps weights as [experts, in, out], and an output of the gate beside the one it is multiplied by
        weight = torch.stack(list(parts), dim=2).flatten(1, 2)
        return weight if experts[3] else weight.transpose(1, 2)
    weight = torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]
    if architecture in _ADDED_TO_ONE and name.endswith("norm.weight"):
        return weight - 1
    if architecture == "llama" and (rotated := _ROTATED.search(name)):
        # llama.cpp keeps the two numbers of a rotated pair side by side, transformers half a head apart
        num_heads = config.num_attention_heads if rotated[1] == "q" else config.num_key_value_heads
        if weight.shape[0] % (2 * num_heads):
            return weight  # a wrong shape is refused later
        return weight.view(num_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if architecture == "gpt2" and _TRANSPOSED.search(name):
        return weight.T
    if name.endswith("shared_expert_gate.weight"):
        return weight.view(1, -1)
    return weight
