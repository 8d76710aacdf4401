"""Derives the config.json of a head from the target's: the same widths, heads and rope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.draft.formats import read_spec
from common.draft.spec import Eagle3Spec
from common.errors import ConfigError, UnsupportedModel

_NEEDED = (
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
)


def head_config(target: Any, *, draft_vocab: int, layers: tuple[int, ...] | None) -> dict[str, Any]:
    """Returns the config of a head in the EAGLE-3 format. `target` is a transformers config.

    `layers` are the target's layers whose input the head reads; None means the format's default. Raises
    UnsupportedModel if the target's config lacks a value that a Llama layer needs.
    """
    for key in _NEEDED:
        if getattr(target, key, None) is None:
            raise UnsupportedModel(f"{target.model_type}: a target whose config has no {key} is not supported")
    num_heads = target.num_attention_heads
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or num_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": getattr(target, "rms_norm_eps", None) or 1e-6,
        "rope_parameters": target.rope_parameters,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if layers is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(layers)
    return config


def head_spec(config: dict[str, Any], target: Any, directory: Path) -> Eagle3Spec:
    """Returns the spec of the head, read from its `config` in the same way as the services will read it.

    `target` is the target model's config and `directory` its directory. Raises ConfigError for layers that the target
    does not have, and UnsupportedModel or DraftMismatch, naming `directory`, if the services would not serve such a
    head.
    """
    spec = read_spec(config, (), directory=str(directory), num_target_layers=target.num_hidden_layers)
    assert isinstance(spec, Eagle3Spec)
    if not all(layer < target.num_hidden_layers for layer in spec.captured_layers):
        raise ConfigError(f"layers: {list(spec.captured_layers)} are not all below {target.num_hidden_layers}")
    return spec
