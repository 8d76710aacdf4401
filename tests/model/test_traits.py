"""Tests that models with an unsupported trait are refused at load, and that the error names the trait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from transformers import AutoModelForCausalLM

from common.errors import UnsupportedModel
from tests.support.loading import load_target
from tests.support.models import save_tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
REFUSED_CONFIGS: dict[str, tuple[Any, str]] = {
    "llama4": (hf.Llama4TextConfig(**SMALL, attention_chunk_size=8), "a layer of type chunked_attention"),
    "mamba": (hf.MambaConfig(), "a layer of type linear_attention"),
    "qwen3_next": (hf.Qwen3NextConfig(**SMALL), "a layer of type linear_attention"),
    "t5": (hf.T5Config(), "an encoder-decoder architecture"),
    "gpt2": (hf.GPT2Config(add_cross_attention=True), "cross attention"),
    "llava": (hf.LlavaConfig(), "a multi-modal architecture"),
    "bloom": (hf.BloomConfig(), "ALiBi attention"),
    "falcon": (hf.FalconConfig(alibi=True), "ALiBi attention"),
    "gemma4": (
        hf.Gemma4TextConfig(**SMALL, layer_types=["full_attention"] * 2, global_head_dim=16, num_kv_shared_layers=1),
        "KV that layers share",
    ),
    "gpt2_of_8_tokens": (hf.GPT2Config(n_positions=8), "a context of 8 tokens"),
    "bidirectional_llama": (hf.LlamaConfig(**SMALL, is_causal=False), "non-causal attention"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_a_config_with_an_unsupported_trait_is_refused_before_weights_are_read(name: str, tmp_path: Path) -> None:
    config, trait = REFUSED_CONFIGS[name]
    directory = tmp_path / name
    config.save_pretrained(str(directory))
    with pytest.raises(UnsupportedModel, match=f"{name}: {trait}"):
        load_target(directory, device="cpu", dtype="float32")


PROBED_CONFIGS: dict[str, tuple[Any, str]] = {
    "bert": (
        hf.BertConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32),
        "non-causal attention",
    ),
    "rwkv": (
        hf.RwkvConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
        "attention in 0 of 2 layers",
    ),
    "gpt_neo": (
        hf.GPTNeoConfig(
            vocab_size=32,
            hidden_size=32,
            num_layers=2,
            attention_types=[[["global"], 2]],
            num_heads=2,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "attention outside transformers' attention interface",
    ),
}


@pytest.mark.parametrize("name", PROBED_CONFIGS)
def test_a_trait_that_only_shows_in_what_the_layers_do_is_refused(name: str, tmp_path: Path) -> None:
    config, trait = PROBED_CONFIGS[name]
    directory = tmp_path / name
    AutoModelForCausalLM.from_config(config).save_pretrained(str(directory))
    with pytest.raises(UnsupportedModel, match=f"{name}: {trait}"):
        load_target(directory, device="cpu", dtype="float32")


def test_a_model_without_a_window_where_its_family_has_one_is_served(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "mistral", sliding_window=None)
    assert load_target(directory, device="cpu", dtype="float32").layer_group.num_layers == 2
