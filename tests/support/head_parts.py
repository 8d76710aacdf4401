"""Parts of the draft heads that tests use: their configs, tensor names and tensors, and how to save and load them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MtpLayout = Literal["nextn", "mimo", "mimo_v2"]
Tensors = dict[str, Tensor]


def vocabulary_tensors(token_ids: Tensor, vocab_size: int) -> Tensors:
    """Returns the tensors `d2t` and `t2d` of a draft vocabulary, given its target ids in ascending order."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[token_ids] = True
    return {"d2t": token_ids - torch.arange(token_ids.numel()), "t2d": known}


def mtp_prefixes(target_dir: Path, layout: MtpLayout, num_layers: int) -> list[str]:
    first = read_config(target_dir)["num_hidden_layers"] if layout == "nextn" else 0
    parent = {"nextn": "model.layers", "mimo": "model.mtp_layers", "mimo_v2": "model.mtp.layers"}[layout]
    return [f"{parent}.{first + layer}." for layer in range(num_layers)]


def mtp_names(layout: MtpLayout, *, step_spelling: bool = False) -> dict[str, str]:
    names = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "fusion": "eh_proj",
        "input_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "output_norm": "shared_head.norm",
        "output_head": "shared_head.head",
    }
    if step_spelling:
        names |= {"output_norm": "transformer.shared_head.norm", "output_head": "transformer.shared_head.output"}
    if layout == "mimo":
        names |= {"embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "fusion": "input_proj"}
        names |= {"output_norm": "final_layernorm"}
    if layout == "mimo_v2":
        names |= {"mlp_norm": "pre_mlp_layernorm", "output_norm": "final_layernorm"}
    return names


def save_head(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def load_head(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """Returns the config and tensors that `save_head` wrote to the directory."""
    return read_config(directory), load_file(directory / "model.safetensors")


def without(tensors: Tensors, names: Iterable[str]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in set(names)}


class RandomTensors:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, num_outputs: int, num_inputs: int) -> Tensor:
        weight: Tensor = torch.randn((num_outputs, num_inputs), generator=self._generator)
        return weight.mul(1.5 / math.sqrt(num_inputs))

    def norm(self, size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self._generator)

    def choice(self, num_ids: int, num_chosen: int) -> Tensor:
        return torch.randperm(num_ids, generator=self._generator)[:num_chosen].sort().values


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def llama_config(target: dict[str, Any], *, size: int, **changes: Any) -> dict[str, Any]:
    """Returns the config of a one-layer llama head with hidden size `size`, and with the target's vocabulary and
    attention heads. `changes` override its fields.
    """
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"],
        "hidden_size": size,
        "intermediate_size": target["intermediate_size"],
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": _head_dim(target),
        "hidden_act": "silu",
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **changes,
    }


def mtp_config(target: dict[str, Any], layout: MtpLayout, num_layers: int) -> dict[str, Any]:
    return {
        **llama_config(target, size=target["hidden_size"]),
        "model_type": {"nextn": "llama", "mimo": "mimo", "mimo_v2": "mimo_v2"}[layout],
        "num_hidden_layers": target["num_hidden_layers"],
        "num_nextn_predict_layers": num_layers,
    }


def _head_dim(target: dict[str, Any]) -> int:
    return int(target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"])


def _block_shapes(prefix: str, target: dict[str, Any], *, size: int, input_size: int) -> dict[str, tuple[int, int]]:
    heads, kv = (target[key] * _head_dim(target) for key in ("num_attention_heads", "num_key_value_heads"))
    wide = target["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (heads, input_size),
        "self_attn.k_proj": (kv, input_size),
        "self_attn.v_proj": (kv, input_size),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (wide, size),
        "mlp.up_proj": (wide, size),
        "mlp.down_proj": (size, wide),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def random_block(
    random: RandomTensors, prefix: str, target: dict[str, Any], *, size: int, input_size: int, qkv_bias: bool
) -> Tensors:
    shapes = _block_shapes(prefix, target, size=size, input_size=input_size)
    tensors = {name: random.weight(*shape) for name, shape in shapes.items()}
    if qkv_bias:
        for name in ("q_proj", "k_proj", "v_proj"):
            num_outputs = shapes[f"{prefix}self_attn.{name}.weight"][0]
            tensors[f"{prefix}self_attn.{name}.bias"] = random.norm(num_outputs) - 1
    return tensors


def silent_block(prefix: str, target: dict[str, Any]) -> Tensors:
    """Returns the tensors of a decoder block that adds nothing to the residual stream: all are zero."""
    size = target["hidden_size"]
    shapes = _block_shapes(prefix, target, size=size, input_size=size)
    return {name: torch.zeros(shape) for name, shape in shapes.items()}
