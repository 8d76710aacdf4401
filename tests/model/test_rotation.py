"""Tests that a model whose rope follows a length rotates every row alike, as transformers rotates a row of the served
context.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from common.checkpoints.digest import compute_fingerprint
from common.errors import UnsupportedModel
from common.model.target import TargetModel
from common.wire.fingerprint import first_difference
from tests.model.paged_model import PagedModel
from tests.support.loading import load_target
from tests.support.models import random_model, save_model, save_tiny_model

ORIGINAL = 64
THETA = {"rope_theta": 10000.0}
SHORT, LONG = [1.0 + 0.05 * i for i in range(8)], [2.0 + 3.0 * i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
    **THETA,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **THETA}
SMALL: dict[str, Any] = {
    "vocab_size": 268,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
BY_LAYER = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
}
CONFIGS: dict[str, Any] = {
    "phi3": hf.Phi3Config(
        **SMALL, max_position_embeddings=256, original_max_position_embeddings=ORIGINAL, rope_parameters=dict(LONGROPE)
    ),
    "longrope with an attention factor": hf.LlamaConfig(
        **SMALL, max_position_embeddings=256, rope_parameters={**LONGROPE, "factor": 8.0, "attention_factor": 1.4}
    ),
    "phi3, half rotated": hf.Phi3Config(
        **SMALL,
        max_position_embeddings=256,
        original_max_position_embeddings=ORIGINAL,
        partial_rotary_factor=0.5,
        rope_parameters={**LONGROPE, "short_factor": SHORT[:4], "long_factor": LONG[:4], "partial_rotary_factor": 0.5},
    ),
    "dynamic": hf.LlamaConfig(**SMALL, max_position_embeddings=ORIGINAL, rope_parameters=dict(DYNAMIC)),
    "dynamic, half rotated": hf.PhiConfig(
        **SMALL, max_position_embeddings=ORIGINAL, rope_parameters={**DYNAMIC, "partial_rotary_factor": 0.5}
    ),
    "longrope in full layers": hf.Gemma3TextConfig(
        **SMALL,
        **BY_LAYER,
        max_position_embeddings=256,
        rope_parameters={"full_attention": dict(LONGROPE), "sliding_attention": {"rope_type": "default", **THETA}},
    ),
    "dynamic in full layers": hf.Gemma3TextConfig(
        **SMALL,
        **BY_LAYER,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"full_attention": dict(DYNAMIC), "sliding_attention": {"rope_type": "default", **THETA}},
    ),
    "dynamic in both kinds of layers": hf.Gemma3TextConfig(
        **SMALL,
        **BY_LAYER,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"full_attention": dict(DYNAMIC), "sliding_attention": {**DYNAMIC, "rope_theta": 3000.0}},
    ),
    "dynamic in full layers with larger heads": hf.Gemma4TextConfig(
        **SMALL,
        layer_types=BY_LAYER["layer_types"],
        sliding_window=24,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"full_attention": dict(DYNAMIC), "sliding_attention": {"rope_type": "default", **THETA}},
    ),
}


each_config = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("phi3", "dynamic") else pytest.mark.thorough) for name in CONFIGS]
)


def saved(config: Any, directory: Path) -> Path:
    return save_model(directory, random_model(config), config.vocab_size)


def load(directory: Path, context: int | None = None) -> TargetModel:
    return load_target(directory, device="cpu", dtype="float32", max_context_tokens=context, attention="torch")


def tokens_of(length: int) -> list[int]:
    drawn = torch.randint(10, 250, (length,), generator=torch.Generator().manual_seed(length))
    return [int(token) for token in drawn]


@torch.inference_mode()
def reference(directory: Path, tokens: list[int]) -> Tensor:
    """Returns the last token's logits that transformers computes for `tokens` at once."""
    model: Any = hf.AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0, -1]


@each_config
@pytest.mark.parametrize("context", [ORIGINAL, 250])
def test_a_row_of_the_served_context_is_rotated_as_by_transformers(name: str, context: int, tmp_path: Path) -> None:
    directory = saved(CONFIGS[name], tmp_path)
    target = load(directory, context)
    paged, tokens = PagedModel(target, num_rows=2), tokens_of(context)
    paged.extend({1: tokens[:40]})
    paged.extend({1: tokens[40:-1], 2: tokens_of(9)})
    logits = paged.extend({1: tokens[-1:]})[0]
    assert target.max_context_tokens == context
    torch.testing.assert_close(logits, reference(directory, tokens), rtol=1e-3, atol=2e-4)


@each_config
def test_a_short_row_beside_a_long_one_is_rotated_as_alone(name: str, tmp_path: Path) -> None:
    target = load(saved(CONFIGS[name], tmp_path), 250)
    alone, beside = PagedModel(target, num_rows=2), PagedModel(target, num_rows=2)
    beside.extend({1: tokens_of(200)})
    expected = alone.extend({2: tokens_of(20)})[0]
    torch.testing.assert_close(beside.extend({1: [9], 2: tokens_of(20)})[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("context", "factor", "mscale"), [(ORIGINAL, SHORT, 1.3), (250, LONG, 1.7)])
def test_mscale_goes_with_the_factors(context: int, factor: list[float], mscale: float, tmp_path: Path) -> None:
    fields = {**SMALL, "num_local_experts": 2, "max_position_embeddings": 256}
    rope = {**LONGROPE, "short_mscale": 1.3, "long_mscale": 1.7}
    of_one_length = {"short_factor": factor, "long_factor": factor, "short_mscale": mscale, "long_mscale": mscale}
    directory = saved(hf.PhimoeConfig(**fields, rope_parameters=dict(rope)), tmp_path / "model")
    expected = saved(hf.PhimoeConfig(**fields, rope_parameters={**rope, **of_one_length}), tmp_path / "expected")
    logits = PagedModel(load(directory, context), num_rows=1).extend({1: tokens_of(ORIGINAL)})[0]
    torch.testing.assert_close(logits, reference(expected, tokens_of(ORIGINAL)), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("name", "most"), [("phi3", 256), ("dynamic", 4 * ORIGINAL)])
def test_the_served_context_is_at_most_what_the_rope_is_made_for(name: str, most: int, tmp_path: Path) -> None:
    directory = saved(CONFIGS[name], tmp_path)
    assert load(directory, 9999).max_context_tokens == most


def test_without_a_limit_dynamic_rope_serves_the_original_context(tmp_path: Path) -> None:
    assert load(saved(CONFIGS["dynamic"], tmp_path)).max_context_tokens == ORIGINAL


@pytest.mark.parametrize(
    ("name", "contexts", "rotations"),
    [
        ("phi3", (32, ORIGINAL), None),
        ("phi3", (ORIGINAL, ORIGINAL + 1), ("longrope-short", "longrope-long")),
        ("phi3", (ORIGINAL + 1, None), None),
        ("dynamic", (32, None), None),
        ("dynamic", (ORIGINAL, ORIGINAL + 1), ("dynamic-64", "dynamic-65")),
        ("dynamic", (100, 101), ("dynamic-100", "dynamic-101")),
    ],
)
def test_services_whose_contexts_choose_different_rotations_have_fingerprints_that_name_them(
    name: str, contexts: tuple[int | None, int | None], rotations: tuple[str, str] | None, tmp_path: Path
) -> None:
    directory = saved(CONFIGS[name], tmp_path / "model")
    fingerprints = [
        compute_fingerprint(directory, load(directory, context), protocol_version=1, cache_dir=tmp_path)
        for context in contexts
    ]
    difference = first_difference(*fingerprints)
    if rotations is None:
        assert difference is None
    else:
        assert difference is not None and difference[0] == "config_digest"
        assert all(f"-{rotation}-" in value for rotation, value in zip(rotations, difference[1:], strict=True))


def test_alpha_rotates_all_lengths_alike_where_the_model_computes_with_it(tmp_path: Path) -> None:
    rope = {**DYNAMIC, "factor": 1.0, "alpha": 50.0}
    config = hf.HunYuanDenseV1Config(**SMALL, max_position_embeddings=256, rope_parameters=rope)
    directory = saved(config, tmp_path)
    paged = PagedModel(load(directory), num_rows=1)
    logits = paged.extend({1: tokens_of(100)})[0]
    torch.testing.assert_close(logits, reference(directory, tokens_of(100)), rtol=1e-3, atol=2e-4)


def test_alpha_is_refused_where_the_model_ignores_it(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "llama", rope_parameters={**DYNAMIC, "alpha": 50.0})
    with pytest.raises(UnsupportedModel, match="rope of type dynamic with alpha is not supported for llama"):
        load(directory)
