"""GGUF files as model directories, with all that they say, or refused by the key or tensor that is not supported.

`python -m common.gguf.convert FILE DIRECTORY DTYPE` converts a file; where it refuses it, it says why in one line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

from common.gguf.config import FREQUENCY_FACTORS, Metadata, RefusedFile, Tensors, config_fields
from common.gguf.tokenizer import build_tokenizer, special_tokens

_ROTATED = re.compile(r"\.self_attn\.(q|k)_proj\.(weight|bias)$")
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)$")
_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


def convert_gguf(path: Path, out_dir: Path, dtype: torch.dtype) -> None:
    """Write the model in `path` to `out_dir`: safetensors in `dtype`, config, generation config, tokenizer.

    Raises RefusedFile unless every key and tensor of the file is in the result, and nothing else.
    """
    reader = _read(path)
    keys = Metadata({name: field.contents() for name, field in reader.fields.items()})
    stored = {tensor.name: tensor for tensor in reader.tensors}
    _check_file(keys)
    tensors = Tensors({name: tuple(int(size) for size in reversed(one.shape)) for name, one in stored.items()})
    frequency_factors = stored.pop(FREQUENCY_FACTORS, None)
    fields = config_fields(
        keys, tensors, None if frequency_factors is None else _values(frequency_factors).numpy().reshape(-1)
    )
    tokenizer, special = build_tokenizer(keys, path, fields["vocab_size"]), special_tokens(keys)
    keys.refuse_unknown()
    config = transformers.AutoConfig.for_model(
        **fields,
        bos_token_id=special.bos,
        pad_token_id=special.padding,
        eos_token_id=special.ends[0] if special.ends else None,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(_weights(model, stored, keys.architecture, dtype), assign=True)
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=special.bos, pad_token_id=special.padding, eos_token_id=list(special.ends) or None
    )
    model.save_pretrained(str(out_dir))
    tokenizer.save_pretrained(str(out_dir))


def _read(path: Path) -> gguf.GGUFReader:
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
        reason = str(error) if isinstance(error, ValueError | KeyError) else "it ends too early"
        raise RefusedFile(f"no GGUF file that can be read: {reason}") from error
    if reader.byte_order != "I":
        raise RefusedFile("a file for machines of the other byte order is not supported")
    end = reader.data_offset
    for tensor in reader.tensors:
        if tensor.data_offset != end:
            raise RefusedFile(f"the tensor {tensor.name} begins at byte {tensor.data_offset}, not at {end}")
        end += -(-tensor.n_bytes // reader.alignment) * int(reader.alignment)
    return reader


def _check_file(keys: Metadata) -> None:
    if keys.take("general.type", str, "model") != "model":
        raise keys.refuse("general.type", "is no model")
    if keys.take("split.count", int, 0) > 1:
        raise keys.refuse("split.count", "files of one model are not supported; merge them with llama-gguf-split")


def _weights(
    model: Any, stored: Mapping[str, gguf.ReaderTensor], architecture: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The model's parameters by name. Raises RefusedFile when one is not in the file, or the file has others."""
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
            parts.append(_values(left.pop(source)))
            if parts[-1].shape != parts[0].shape:
                raise RefusedFile(f"the tensor {source} has the shape {list(parts[-1].shape)}, its like another")
        weight = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        weight = _as_computed(name, weight, model.config, architecture)
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
    """The file's tensors that make a parameter, in order."""
    if experts := _EXPERTS.match(name):
        parts = ("gate", "up") if experts[2] == "gate_up_proj" else ("down",)
        return [f"blk.{experts[1]}.ffn_{part}_exps.weight" for part in parts]
    stem, _, kind = name.rpartition(".")
    base = names.get_name(stem)
    if base is None:
        raise RefusedFile(f"the file has no place for {name}")
    return [f"{base}.{kind}"]


def _values(tensor: gguf.ReaderTensor) -> Tensor:
    kind = tensor.tensor_type.name
    if kind in ("I8", "I16", "I32", "I64"):
        raise RefusedFile(f"the tensor {tensor.name} is of type {kind}")
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise RefusedFile(f"the tensor {tensor.name} is of type {kind}, which is not supported") from error
    return torch.from_numpy(values.copy())


def _as_computed(name: str, weight: Tensor, config: Any, architecture: str) -> Tensor:
    """A tensor of llama.cpp's as transformers computes with it."""
    if architecture == "llama" and (rotated := _ROTATED.search(name)):
        # llama.cpp keeps the two numbers of a rotated pair side by side, transformers half a head apart
        num_heads = config.num_attention_heads if rotated[1] == "q" else config.num_key_value_heads
        if weight.shape[0] % (2 * num_heads):
            return weight  # its shape is refused
        return weight.view(num_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if architecture == "gpt2" and _TRANSPOSED.search(name):
        return weight.T
    if name.endswith("shared_expert_gate.weight"):
        return weight.view(1, -1)
    return weight


if __name__ == "__main__":
    try:
        convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3]))
    except RefusedFile as refused:
        sys.exit(str(refused))
