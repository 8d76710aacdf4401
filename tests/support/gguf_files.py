"""GGUF files of tiny models, written as llama.cpp's converter writes them, unchanged or with one thing changed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from tests.support.models import END_ID, START_ID, make_tokenizer

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


@dataclass(frozen=True)
class GgufFile:
    architecture: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]

    def changed(self, keys: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> GgufFile:
        """Returns a copy with other keys and tensors. The value None removes a key or a tensor, and `{arch}` in a key
        stands for the architecture.
        """
        named = {key.format(arch=self.architecture): value for key, value in keys.items()}
        return GgufFile(
            self.architecture,
            {key: value for key, value in {**self.keys, **named}.items() if value is not None},
            {name: value for name, value in {**self.tensors, **(tensors or {})}.items() if value is not None},
        )

    def write(self, path: Path, *, kind: gguf.GGMLQuantizationType | None = None) -> Path:
        """Writes the file. `kind` is the quantisation of the matrices; numbers among the keys are 32 bits wide, as
        llama.cpp writes them.
        """
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, value in self.tensors.items():
            if kind is None or value.ndim < 2:
                writer.add_tensor(name, value)
            else:
                writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def gguf_of(model: Any, tokenizer: PreTrainedTokenizerFast | None = None) -> GgufFile:
    """Converts a transformers model to a GGUF file that states every key of its architecture."""
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    own = {f"{architecture}.{name}": value for name, value in _own_keys(config).items()}
    return GgufFile(
        architecture, {**own, **_tokenizer_keys(tokenizer or make_tokenizer())}, _tensors(model, architecture)
    )


def _own_keys(config: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
    }
    if config.model_type == "gpt2":
        return keys | {
            "feed_forward_length": config.n_inner or 4 * config.n_embd,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys |= {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
        **_window_keys(config),
        **_longrope_keys(config, rope),
    }
    if config.model_type == "starcoder2":
        return keys | {"attention.layer_norm_epsilon": config.norm_epsilon}
    keys |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if num_experts:
        keys |= {"expert_count": num_experts, "expert_used_count": config.num_experts_per_tok}
    if hasattr(config, "moe_intermediate_size"):
        keys |= {"expert_feed_forward_length": config.moe_intermediate_size}
    if hasattr(config, "shared_expert_intermediate_size"):
        keys |= {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return keys


def _longrope_keys(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns what llama.cpp's converter writes for Phi-3. It names no scaling type."""
    if rope["rope_type"] != "longrope":
        return {}
    original = config.original_max_position_embeddings
    scale = config.max_position_embeddings / original
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(original)),
    }


def _window_keys(config: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    if config.model_type in ("gemma2", "gemma3_text", "gpt_oss"):
        local = config.rope_parameters.get("sliding_attention", config.rope_parameters)
        keys["attention.sliding_window_pattern"] = config.layer_types.index("full_attention") + 1
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            keys[name] = getattr(config, name)
    return keys


def _tokenizer_keys(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = {token["content"] for token in parts["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token, _ in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in parts["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": START_ID,
        "tokenizer.ggml.eos_token_id": END_ID,
    }


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if ".experts." in name:
            for kind, part in _expert_parts(architecture, name, tensor).items():
                tensors[f"blk.{name.split('.')[2]}.ffn_{kind}"] = part.contiguous().numpy()
            continue
        stem, suffix = (name, "weight") if name.endswith("sinks") else name.rsplit(".", 1)
        gguf_name = names.get_name(stem)
        assert gguf_name is not None, name
        tensors[f"{gguf_name}.{suffix}"] = _as_stored(model, architecture, name, tensor).contiguous().numpy()
    for kind in ("short", "long"):
        if factors := getattr(model.config, "rope_parameters", {}).get(f"{kind}_factor"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(factors, dtype=np.float32)
    return tensors


def _expert_parts(architecture: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    kinds = ("gate", "up") if "gate_up_proj" in name else ("down",)
    suffix = "bias" if name.endswith("_bias") else "weight"
    if architecture == "gpt-oss":  # gates alternate with what they are multiplied by, and weights are [in, out]
        parts = [tensor[..., place :: len(kinds)] for place in range(len(kinds))]
        parts = parts if suffix == "bias" else [part.transpose(1, 2) for part in parts]
    else:
        parts = list(tensor.chunk(len(kinds), dim=1))
    return {f"{kind}_exps.{suffix}": part for kind, part in zip(kinds, parts, strict=True)}


def _as_stored(model: Any, architecture: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if architecture == "llama" and name.endswith(_ROTATED):  # llama.cpp puts the halves of a rotary pair side by side
        heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
