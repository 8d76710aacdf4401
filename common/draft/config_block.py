"""Reads a draft head's config.json: typed values, and the head's layer, which all formats describe as Llama does."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig

from common.draft.spec import BlockSpec
from common.errors import DraftMismatch, UnsupportedModel
from common.model.traits import check_config

_MODEL_TYPES = ("llama", "mistral", "qwen2", "mimo", "mimo_v2", "mimo_v2_flash")
"""The model types whose layers are computed like Llama's.

Others differ, for example by norms that add one to the weight, by gates, or by another attention.
"""
_QKV_BIAS_ONLY = ("qwen2", "mimo")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_MLA_KEYS = ("kv_lora_rank", "q_lora_rank")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class ConfigReader:
    """Reads typed values from a config.

    Errors name `directory` and `path`, the keys of the enclosing objects, such as "eagle_config.".
    """

    def __init__(self, config: Mapping[str, Any], directory: str, path: str = "") -> None:
        self.config = config
        self.directory = directory
        self._path = path

    def value(self, key: str, kind: type, default: Any) -> Any:
        """Returns the value of `key`, or `default` if it is absent or null.

        Raises DraftMismatch if its type is not `kind`. An integer is converted where `kind` is float.
        """
        value = self.config.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.mismatch(f"{self._path}{key} is {value!r}")
        return value

    def required(self, key: str, kind: type) -> Any:
        """Returns the value of `key`. Raises DraftMismatch if it is absent or null, or its type is not `kind`."""
        value = self.value(key, kind, None)
        if value is None:
            raise self.mismatch(f"{self._path}{key} is missing")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Returns the value of `key`, a positive integer, or `default` if it is absent or null.

        Raises DraftMismatch if the value is no positive integer, or if it is absent or null and `default` is None.
        """
        value: int = self.value(key, int, default)
        if value is None:
            raise self.mismatch(f"{self._path}{key} is missing")
        if value < 1:
            raise self.mismatch(f"{self._path}{key} is {value}")
        return value

    def nested(self, key: str) -> ConfigReader:
        """Returns a reader of the object `key` in this config, or of an empty one if `key` is absent or null.

        Raises DraftMismatch if the value is no object.
        """
        return ConfigReader(self.value(key, dict, {}), self.directory, f"{self._path}{key}.")

    def mismatch(self, message: str) -> DraftMismatch:
        """Returns a DraftMismatch about the config, for the caller to raise."""
        return DraftMismatch(f"{self.directory}: config.json: {message}")

    def unsupported(self, trait: str) -> UnsupportedModel:
        """Returns an UnsupportedModel that says that `trait` is not supported, for the caller to raise."""
        return UnsupportedModel(f"{self.directory}: config.json: {self._path}{trait} is not supported")


def read_block(reader: ConfigReader) -> BlockSpec:
    """Returns the specification of the transformer layer that the config describes.

    Raises UnsupportedModel if the layer is computed in another way than Llama's or Qwen2's, and DraftMismatch for
    missing or invalid values.
    """
    num_heads, hidden_size = reader.size("num_attention_heads"), reader.size("hidden_size")
    num_kv_heads = reader.size("num_key_value_heads", num_heads)
    head_dim = reader.size("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise reader.mismatch(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise reader.mismatch(f"head_dim {head_dim} is odd")
    rope = _read_rope(reader, num_heads, head_dim)
    _refuse_other_layers(reader, rope)
    model_type = reader.value("model_type", str, "llama")
    has_bias = reader.value("attention_bias", bool, model_type in _QKV_BIAS_ONLY)
    return BlockSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.size("intermediate_size"),
        norm_epsilon=reader.value("layernorm_epsilon", float, None) or reader.required("rms_norm_eps", float),
        qkv_bias=has_bias,
        out_bias=has_bias and model_type not in _QKV_BIAS_ONLY,
        rope=rope,
    )


def _read_rope(reader: ConfigReader, num_heads: int, head_dim: int) -> LlamaConfig:
    """Returns a LlamaConfig that describes the head's rotary embedding. Raises DraftMismatch for invalid values."""
    fields = {key: copy.deepcopy(reader.config[key]) for key in _ROPE_KEYS if reader.config.get(key) is not None}
    try:
        config = LlamaConfig(
            hidden_size=num_heads * head_dim, num_attention_heads=num_heads, head_dim=head_dim, **fields
        )
    except (KeyError, TypeError, ValueError) as error:
        raise reader.mismatch(f"rope_scaling or rope_parameters: {error}") from error
    return config


def _refuse_other_layers(reader: ConfigReader, rope: LlamaConfig) -> None:
    """Raises UnsupportedModel if the layer is computed in another way than Llama's or Qwen2's."""
    config = reader.config
    check_config(SimpleNamespace(**{**config, "rope_parameters": rope.rope_parameters}), name=reader.directory)
    if (window := config.get("sliding_window")) is not None and config.get("use_sliding_window") is not False:
        raise reader.unsupported(f"sliding-window attention (sliding_window={window})")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise reader.unsupported("a layer of type sliding_attention")
    for key in _MLA_KEYS:
        if config.get(key) is not None:
            raise reader.unsupported(f"multi-head latent attention ({key})")
    for key in _EXPERT_KEYS:
        if (config.get(key) or 0) > 1:
            raise reader.unsupported(f"an MLP of experts ({key})")
    for key, served in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0), ("mlp_bias", False)):
        if (config.get(key) or served) != served:
            raise reader.unsupported(f"{key} {config[key]!r}")
    if config.get("quantization_config") is not None:
        raise reader.unsupported("quantization_config")
    model_type = config.get("model_type") or "llama"
    if model_type not in _MODEL_TYPES:
        raise reader.unsupported(f"model_type {model_type!r}")
    parameters = rope.rope_parameters or {}
    if parameters.get("rope_type") not in _ROPE_TYPES or "mrope_section" in parameters:
        raise reader.unsupported(f"rope {parameters}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise reader.unsupported(f"partial_rotary_factor {parameters['partial_rotary_factor']}")
