"""Tests that GGUF files compute the same as the model they were written from, or are refused with an error that names
the key or tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GemmaTokenizer, LlamaTokenizer

from common.checkpoints.source import resolve_model
from common.errors import StartupError
from common.gguf.config import RefusedFile
from common.gguf.convert import convert_gguf
from common.text.tokenizer import TextTokenizer
from tests.model.paged_model import PagedModel
from tests.support.gguf_files import GgufFile, gguf_of
from tests.support.loading import load_target
from tests.support.models import END_ID, VOCAB_SIZE, make_tokenizer, random_model

PROMPT = [9, 40, 41, 200, 77, 5, 120, 8, 8, 33]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END_ID,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = 4
"""Tokens in a sliding window: fewer than in PROMPT."""

ONE_OF_EACH: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
ALL_FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "sliding_window": WINDOW}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "phi3": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "gpt2": {},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, **ONE_OF_EACH},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, **ONE_OF_EACH},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        **ONE_OF_EACH,
    },
}
WINDOWED = ("llama", "mistral", "mixtral", "phi3", "starcoder2", "gemma2", "gemma3_text", "gpt_oss")
CAPPED = {"attn_logit_softcapping": ("gemma2",), "final_logit_softcapping": ("gemma2", "gemma3_text")}
QUICK = ("llama", "gemma2", "mixtral")
"""Model types that the gate tests."""
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens."""
NO_OUTPUT = ("gemma2",)
"""Model types whose output is always tied to the embedding."""

THETA = {"rope_theta": 10000.0}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "original_max_position_embeddings": 8192, **THETA}
GEMMA_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **THETA}
YARN_KEYS: dict[str, Any] = {
    "{arch}.rope.scaling.type": "yarn",
    "{arch}.rope.scaling.factor": 4.0,
    "{arch}.rope.scaling.original_context_length": 128,
}
LINEAR: dict[str, Any] = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}


def quick_first(cases: Iterable[tuple[Any, ...]]) -> list[ParameterSet]:
    """Returns cases for tests, of which those of other model types than QUICK are thorough."""
    return [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.thorough) for case in cases]


def source_model(model_type: str, **changes: Any) -> Any:
    """Returns a tiny transformers model with these fields changed in its config."""
    config = AutoConfig.for_model(model_type, **{**SHAPE, **ARCHITECTURES[model_type], **changes})
    return random_model(config)


def frequency_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Returns the frequency factors that llama.cpp's converter writes for a rope of type llama3."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for exponent in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (exponent / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def converted(tmp_path: Path, file: GgufFile, *, kind: Any = None, dtype: str = "float32") -> Path:
    convert_gguf(file.write(tmp_path / "tiny.gguf", kind=kind), tmp_path / "out", dtype)
    return tmp_path / "out"


def check_parity(directory: Path, source: Any, *, max_context_tokens: int | None = None) -> None:
    """Asserts that the logits of a prompt in two chunks equal the source model's."""
    source.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = source(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    target = load_target(
        directory, device="cpu", dtype="float32", max_context_tokens=max_context_tokens, optimizes_modules=False
    )
    paged = PagedModel(target, num_rows=1)
    paged.extend({1: PROMPT[:4]})
    torch.testing.assert_close(paged.extend({1: PROMPT[4:]})[0], expected, atol=1e-4, rtol=1e-4)


def refusal(tmp_path: Path, file: GgufFile, *, dtype: str = "float32") -> str:
    with pytest.raises(RefusedFile) as refused:
        converted(tmp_path, file, dtype=dtype)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
    return str(refused.value)


@pytest.fixture(scope="module")
def file_of() -> Callable[[str], GgufFile]:
    files: dict[str, GgufFile] = {}

    def make(model_type: str) -> GgufFile:
        if model_type not in files:
            files[model_type] = gguf_of(source_model(model_type))
        return files[model_type]

    return make


# ---- parity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "is_tied"),
    quick_first(
        [
            *((model_type, False) for model_type in ARCHITECTURES if model_type not in NO_OUTPUT),
            *((model_type, True) for model_type in ("llama", "qwen3", "gpt2", "gemma2", "gemma3_text")),
        ]
    ),
)
def test_each_architecture_computes_what_its_source_does(tmp_path: Path, model_type: str, is_tied: bool) -> None:
    source = source_model(model_type, tie_word_embeddings=is_tied)
    file = gguf_of(source)
    assert ("output.weight" in file.tensors) is not is_tied
    directory = converted(tmp_path, file)
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    check_parity(directory, source)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "fields", "keys"),
    [
        ("llama", {"attention_bias": True}, {}),
        ("llama", {"mlp_bias": True}, {}),
        ("llama", {"head_dim": 8}, {}),
        ("llama", {"head_dim": 32, "num_key_value_heads": 1}, {}),
        ("llama", {"num_key_value_heads": 4}, {"{arch}.attention.head_count_kv": None}),
        ("llama", {"rms_norm_eps": 0.01}, {}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, {}),
        ("llama", {}, {"{arch}.rope.freq_base": None, "{arch}.rope.dimension_count": None, "{arch}.vocab_size": None}),
        ("llama", {}, {"{arch}.attention.key_length": None, "{arch}.attention.value_length": None}),
        ("llama", {}, {"{arch}.attention.head_count_kv": [2, 2]}),
        ("llama", LINEAR, {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0}),
        ("llama", LINEAR, {"{arch}.rope.scaling.factor": 4.0}),
        ("llama", {}, {"{arch}.rope.scaling.type": "none", "{arch}.rope.scaling.finetuned": True}),
        *(
            (
                model_type,
                {"rope_parameters": {**YARN, **betas}},
                {**YARN_KEYS, **{f"{{arch}}.rope.scaling.yarn_{name}": value for name, value in betas.items()}},
            )
            for model_type in ("llama", "qwen2", "qwen3_moe")
            for betas in ({}, {"beta_fast": 16.0, "beta_slow": 2.0})
        ),
        *((model_type, {"head_dim": 32}, {}) for model_type in ("mixtral", "qwen2", "qwen2_moe", "phi3", "starcoder2")),
        ("gpt2", {}, {"{arch}.attention.key_length": 16, "{arch}.attention.value_length": 16}),
        ("qwen3", {"attention_bias": True}, {}),
        ("qwen3_moe", {"norm_topk_prob": False}, {"{arch}.expert_weights_norm": False}),
        ("qwen2_moe", {"norm_topk_prob": True}, {"{arch}.expert_weights_norm": True}),
        ("qwen2_moe", {}, {"{arch}.expert_shared_feed_forward_length": None}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}}, {}),
        ("phi3", {}, {"{arch}.attention.sliding_window": 0}),
        ("starcoder2", {"use_bias": False}, {}),
        ("gpt2", {"n_inner": 48, "layer_norm_epsilon": 0.01}, {}),
        *((model_type, {"sliding_window": WINDOW}, {}) for model_type in ("mistral", "mixtral", "phi3", "starcoder2")),
        ("phi3", {"sliding_window": 1 << 18}, {}),
        ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, {}),
        (
            "gemma2",
            {"sliding_window": 4096},
            {
                "{arch}.attention.sliding_window": None,
                "{arch}.attention.sliding_window_pattern": None,
                "{arch}.attn_logit_softcapping": None,
                "{arch}.final_logit_softcapping": None,
                "{arch}.rope.freq_base_swa": None,
            },
        ),
        (
            "gemma3_text",
            {"num_hidden_layers": 7, "layer_types": None},
            {"{arch}.attention.sliding_window_pattern": None, "{arch}.rope.freq_base_swa": None},
        ),
        ("gemma3_text", ALL_FULL, {}),
        ("gemma3_text", ALL_FULL, {"{arch}.attention.sliding_window": 0}),
        ("gemma3_text", ALL_FULL, {"{arch}.attention.sliding_window": None}),
        ("gemma3_text", {"final_logit_softcapping": 3.0}, {}),
        ("gemma3_text", {}, {"{arch}.final_logit_softcapping": 0.0}),
        ("gemma3_text", {"rope_parameters": GEMMA_ROPE}, {}),
        (
            "gemma3_text",
            {"rope_parameters": {**GEMMA_ROPE, "full_attention": {"rope_type": "linear", "factor": 8.0, **THETA}}},
            {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 8.0},
        ),
        ("gpt_oss", {"sliding_window": 3}, {"{arch}.attention.sliding_window_pattern": None}),
        ("gpt_oss", {}, {"{arch}.feed_forward_length": 64, "{arch}.expert_feed_forward_length": 96}),
        ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}}, YARN_KEYS),
    ],
)
def test_each_key_is_computed_with(
    tmp_path: Path, model_type: str, fields: dict[str, Any], keys: dict[str, Any]
) -> None:
    source = source_model(model_type, **fields)
    check_parity(converted(tmp_path, gguf_of(source).changed(keys)), source)


@pytest.mark.thorough
@pytest.mark.parametrize(("model_type", "num_layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemma_scales_queries_by_width_over_heads(tmp_path: Path, model_type: str, num_layers: int) -> None:
    for count, scale in ((num_layers, SHAPE["hidden_size"] // SHAPE["num_attention_heads"]), (num_layers - 1, 32)):
        source = source_model(model_type, num_hidden_layers=count, layer_types=None)
        (tmp_path / str(count)).mkdir()
        directory = converted(tmp_path / str(count), gguf_of(source))
        assert json.loads((directory / "config.json").read_text())["query_pre_attn_scalar"] == scale


@pytest.mark.parametrize(
    ("model_type", "factor", "low", "high", "length"),
    [
        ("llama", 8.0, 1.0, 4.0, 8192),  # Llama 3.1
        *((model_type, 32.0, 1.0, 4.0, 8192) for model_type in ("mixtral", "qwen2", "qwen3")),  # Llama 3.2
        ("llama", 4.0, 1.0, 1.5, 1000),
        ("llama", 3.0, 0.001, 0.002, 64),
        ("llama", 3.0, 100.0, 200.0, 64),
        ("llama", 16.0, 0.01, 64.0, 256),
    ],
)
def test_frequency_factors_are_the_rope_they_were_written_from(
    tmp_path: Path, model_type: str, factor: float, low: float, high: float, length: int
) -> None:
    rope = {**LLAMA3, "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    rope["original_max_position_embeddings"] = length
    source = source_model(model_type, rope_parameters=rope)
    head_dim = gguf_of(source).keys[f"{gguf_of(source).architecture}.attention.key_length"]
    file = gguf_of(source).changed({}, {"rope_freqs.weight": frequency_factors(rope, head_dim)})
    check_parity(converted(tmp_path, file), source)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("named", [False, True])
def test_longrope_of_phi3_has_its_factors_and_its_scale(
    tmp_path: Path, is_long: bool, share: float, named: bool
) -> None:
    original = len(PROMPT) - 1 if is_long else len(PROMPT)
    num_factors = int(8 * share)
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(num_factors)],
        "long_factor": [2.0 + 3.0 * i for i in range(num_factors)],
        "partial_rotary_factor": share,
        **THETA,
    }
    source = source_model("phi3", rope_parameters=rope, original_max_position_embeddings=original)
    file = gguf_of(source)
    file = file.changed({"{arch}.rope.scaling.type": "longrope"} if named else {})
    context = source.config.max_position_embeddings if is_long else original
    check_parity(converted(tmp_path, file), source, max_context_tokens=context)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "BF16", "F16"])
def test_quantised_tensors_are_what_their_blocks_say(tmp_path: Path, kind: str) -> None:
    source, quant = source_model("llama"), gguf.GGMLQuantizationType[kind]
    file = gguf_of(source)
    directory = converted(tmp_path, file, kind=quant)
    with torch.no_grad():
        for parameter in source.parameters():
            if parameter.dim() == 2:
                blocks = gguf.quantize(parameter.numpy(), quant)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, quant).copy()))
    check_parity(directory, source)


# ---- refused by key -------------------------------------------------------------------------------------------------

REFUSED_EVERYWHERE: dict[str, Any] = {
    "{arch}.attention.sliding_window": -1,
    "{arch}.attention.causal": False,
    "{arch}.attention.scale": 0.5,
    "{arch}.attention.clamp_kqv": 8.0,
    "{arch}.attention.max_alibi_bias": 8.0,
    "{arch}.attention.temperature_length": 8192,
    "{arch}.attn_logit_softcapping": -30.0,
    "{arch}.final_logit_softcapping": -30.0,
    "{arch}.logit_scale": 0.5,
    "{arch}.embedding_scale": 2.0,
    "{arch}.residual_scale": 0.5,
    "{arch}.pooling_type": 1,
    "{arch}.use_parallel_residual": True,
    "{arch}.expert_weights_scale": 2.5,
    "{arch}.leading_dense_block_count": 1,
    "{arch}.nextn_predict_layers": 1,
    "{arch}.something_new": 1,
    "{arch}.context_length": 0,
    "{arch}.embedding_length": "64",
    "{arch}.block_count": 3,
    "{arch}.vocab_size": VOCAB_SIZE + 1,
    "{arch}.attention.head_count": [4, 2],
    "{arch}.attention.head_count_kv": 3,
    "{arch}.attention.value_length": 24,
    "general.type": "adapter",
    "general.something_new": 1,
    "split.count": 2,
    "xielu.alpha_p": [1.0, 1.0],
    "tokenizer.ggml.model": "rwkv",
    "tokenizer.ggml.pre": "something-new",
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.ggml.precompiled_charsmap": [1, 2],
    "tokenizer.ggml.something_new": 1,
    "tokenizer.ggml.eos_token_id": VOCAB_SIZE,
    "tokenizer.ggml.eot_token_id": 1 << 31,
    "tokenizer.ggml.eom_token_id": -1,
    "tokenizer.ggml.eos_token_ids": [END_ID, VOCAB_SIZE],
    "tokenizer.ggml.bos_token_id": "1",
    "tokenizer.ggml.padding_token_id": VOCAB_SIZE,
    "tokenizer.ggml.token_type": [1],
    "tokenizer.ggml.merges": ["t h", "th"],
    "tokenizer.ggml.tokens": [1, 2, 3],
    "tokenizer.chat_template": 1,
    "tokenizer.chat_template.tool_use": 1,
    "tokenizer.huggingface.json": "{}",
}
LENGTHS = ("rope_factors_short.weight", "rope_factors_long.weight")
REFUSED_WITH_ROTATION: dict[str, Any] = {
    "{arch}.rope.dimension_count": 64,
    "{arch}.rope.freq_base": 0.0,
    "{arch}.rope.scaling.type": "longrope",
    "{arch}.rope.scaling.factor": math.nan,
    "{arch}.rope.scaling.attn_factor": 1.2,
    "{arch}.rope.scaling.yarn_log_multiplier": 0.1,
    "{arch}.rope.dimension_sections": [2, 2, 4],
}


@pytest.mark.parametrize("model_type", quick_first((each,) for each in ARCHITECTURES))
def test_a_key_that_cannot_be_computed_with_is_named(
    tmp_path: Path, model_type: str, file_of: Callable[[str], GgufFile]
) -> None:
    file = file_of(model_type)
    refused = REFUSED_EVERYWHERE | ({} if model_type == "gpt2" else REFUSED_WITH_ROTATION)
    if model_type not in WINDOWED:
        refused |= {"{arch}.attention.sliding_window": 64}
    refused |= {f"{{arch}}.{key}": 30.0 for key, model_types in CAPPED.items() if model_type not in model_types}
    for key, value in refused.items():
        assert key.format(arch=file.architecture) in refusal(tmp_path, file.changed({key: value})), key


@pytest.mark.parametrize(
    ("model_type", "keys", "named"),
    [
        ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "original_context_length"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor"),
        ("llama", {"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor"),
        ("llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.5}, "llama.rope.scaling.factor"),
        ("llama", {"llama.rope.freq_base_swa": 500.0}, "llama.rope.freq_base_swa"),
        ("llama", {"llama.attention.sliding_window_pattern": 2}, "llama.attention.sliding_window_pattern"),
        ("llama", {"llama.attention.key_length": 32, "llama.attention.value_length": 32}, "llama.rope.dimension_count"),
        ("llama", {"llama.feed_forward_length": [96, 48]}, "llama.feed_forward_length"),
        ("mixtral", {"llama.expert_count": 8}, "blk.0.ffn_gate_inp.weight has the shape"),
        ("mixtral", {"llama.interleave_moe_layer_step": 1}, "llama.interleave_moe_layer_step"),
        ("llama", {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor"),
        ("llama", {"llama.rope.scale_linear": 4.0}, "llama.rope.scale_linear"),
        ("llama", {"llama.attention.head_count": None}, "llama.attention.head_count is missing"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ("llama", {"llama.attention.layer_norm_rms_epsilon": -1.0}, "llama.attention.layer_norm_rms_epsilon"),
        ("llama", {"llama.block_count": 10_000_000}, "llama.block_count"),
        ("llama", {"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ("llama", {"tokenizer.ggml.tokens": ["a"] * VOCAB_SIZE}, "tokenizer.ggml.tokens"),
        ("llama", {"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ("llama", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id"),
        ("mixtral", {"llama.expert_used_count": 5}, "llama.expert_used_count"),
        ("mixtral", {"llama.expert_gating_func": 2}, "llama.expert_gating_func"),
        ("mixtral", {"llama.expert_feed_forward_length": 48}, "llama.expert_feed_forward_length"),
        ("qwen3_moe", {"qwen3moe.expert_shared_count": 1}, "qwen3moe.expert_shared_count"),
        ("phi3", {"phi3.rope.dimension_count": 7}, "phi3.rope.dimension_count"),
        ("phi3", {"phi3.attention.sliding_window_pattern": 2}, "phi3.attention.sliding_window_pattern"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": 0}, "gemma2.attention.sliding_window_pattern"),
        ("gemma2", {"gemma2.attn_logit_softcapping": 0.0}, "gemma2.attn_logit_softcapping"),
        ("gemma2", {"gemma2.rope.freq_base_swa": 500.0}, "gemma2.rope.freq_base_swa"),
        ("gemma3_text", {"gemma3.attention.sliding_window_pattern": [1]}, "gemma3.attention.sliding_window_pattern"),
        ("gemma3_text", {"gemma3.rope.freq_base_swa": 0.0}, "gemma3.rope.freq_base_swa"),
        ("gemma3_text", YARN_KEYS, "gemma3.rope.scaling.type"),
        ("gpt_oss", {"gpt-oss.attention.sliding_window": None}, "gpt-oss.attention.sliding_window is missing"),
        ("gpt_oss", {"gpt-oss.rope.freq_base_swa": 500.0}, "gpt-oss.rope.freq_base_swa"),
    ],
)
def test_keys_that_do_not_fit_each_other_are_named(
    tmp_path: Path, model_type: str, keys: dict[str, Any], named: str, file_of: Callable[[str], GgufFile]
) -> None:
    assert named in refusal(tmp_path, file_of(model_type).changed(keys))


@pytest.mark.parametrize("name", ["gemma3n", "bert", "t5", "mamba", "falcon", "none-such"])
def test_an_architecture_that_is_not_known_is_named(
    tmp_path: Path, name: str, file_of: Callable[[str], GgufFile]
) -> None:
    file = file_of("llama")
    assert repr(name) in refusal(tmp_path, GgufFile(name, file.keys, file.tensors))


def test_information_about_the_file_changes_nothing(tmp_path: Path, file_of: Callable[[str], GgufFile]) -> None:
    keys = {
        "general.name": "mistral",
        "general.type": "model",
        "general.file_type": 1,
        "general.base_model.0.name": "another",
        "general.sampling.temp": 0.6,
        "quantize.imatrix.file": "imatrix.dat",
        "mradermacher.quantized_by": "somebody",
        "split.count": 1,
        "llama.attention.causal": True,
        "llama.rope.scaling.finetuned": False,
        "tokenizer.chat_template.rag": "{{ documents }}",
        "tokenizer.ggml.fim_pre_token_id": 3,
    }
    source = source_model("llama")
    check_parity(converted(tmp_path, gguf_of(source).changed(keys)), source)


@pytest.mark.parametrize("tool_use", [None, "{{ tools }}<tool_call>"])
def test_chat_templates_are_those_of_the_file(
    tmp_path: Path, tool_use: str | None, file_of: Callable[[str], GgufFile]
) -> None:
    keys = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": tool_use}
    texts = TextTokenizer.from_directory(converted(tmp_path, file_of("llama").changed(keys))).chat_template()
    assert (texts.source, texts.tool_use) == ("{{ messages }}", tool_use)


def one_wrong(number: float) -> np.ndarray:
    """Returns the weights of a norm: ones, and `number` in one place."""
    return np.array([1.0, number, *[1.0] * 62], np.float32)


# ---- refused by tensor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", quick_first((each,) for each in ARCHITECTURES))
def test_a_tensor_that_is_missing_is_named(tmp_path: Path, model_type: str, file_of: Callable[[str], GgufFile]) -> None:
    file = file_of(model_type)
    untied = {"output.weight"}  # without it, the output is tied to the embedding
    for name in {name for name in file.tensors if not name.startswith("blk.0.")} - untied:
        assert name in refusal(tmp_path, file.changed({}, {name: None}))


@pytest.mark.parametrize(
    ("model_type", "tensors", "named"),
    [
        ("llama", {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, "blk.0.attn_sinks.weight"),
        ("llama", {"blk.0.ffn_gate.0.weight": np.zeros((96, 64), np.float32)}, "blk.0.ffn_gate.0.weight"),
        ("llama", {"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "blk.0.attn_k.bias is missing"),
        ("llama", {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, "blk.0.attn_q_norm.weight"),
        ("llama", {"blk.2.attn_q.weight": np.zeros((64, 64), np.float32)}, "llama.block_count"),
        ("llama", {"blk.0.attn_q.weight": np.zeros((32, 64), np.float32)}, "blk.0.attn_q.weight has the shape"),
        ("llama", {"blk.0.ffn_up.weight": np.zeros((64, 96), np.float32)}, "blk.0.ffn_up.weight has the shape"),
        ("llama", {"blk.0.ffn_up.weight": np.zeros((96, 64), np.int32)}, "blk.0.ffn_up.weight is of type I32"),
        ("llama", {"output_norm.weight": one_wrong(np.nan)}, "output_norm.weight has numbers"),
        ("llama", {"output_norm.weight": one_wrong(np.inf)}, "output_norm.weight has numbers"),
        ("llama", {"rope_freqs.weight": np.full(8, 0.5, np.float32)}, "rope_freqs.weight"),
        ("llama", {"rope_freqs.weight": np.array([1, 9, 1, 9, 1, 9, 1, 9], np.float32)}, "rope_freqs.weight"),
        ("llama", {"rope_freqs.weight": np.ones(4, np.float32)}, "rope_freqs.weight"),
        ("llama", {"rope_factors_long.weight": np.ones(8, np.float32)}, "rope_factors_long.weight"),
        ("gemma2", {"rope_freqs.weight": np.ones(16, np.float32)}, "rope_freqs.weight"),
        ("gpt2", {"rope_freqs.weight": np.ones(16, np.float32)}, "rope_freqs.weight"),
        ("gemma2", {"output.weight": np.ones((VOCAB_SIZE, 64), np.float32)}, "output.weight"),
        ("gemma3_text", {"blk.1.attn_q.bias": np.zeros(128, np.float32)}, "blk.1.attn_q.bias"),
        ("gpt_oss", {"blk.0.attn_sinks.weight": np.zeros(3, np.float32)}, "blk.0.attn_sinks.weight has the shape"),
        ("gpt_oss", {"blk.0.ffn_down_exps.weight": np.zeros(64, np.float32)}, "blk.0.ffn_down_exps.weight has the"),
        ("gpt_oss", {"blk.0.ffn_up_exps.bias": np.zeros((4, 95), np.float32)}, "blk.0.ffn_up_exps.bias has the shape"),
        ("phi3", {"rope_factors_long.weight": np.ones(8, np.float32)}, "rope_factors_short.weight"),
        ("phi3", dict.fromkeys(LENGTHS, np.ones(7, np.float32)), "rope_factors_short.weight: not 8 factors above 0"),
        ("phi3", dict.fromkeys(LENGTHS, np.zeros(8, np.float32)), "rope_factors_short.weight: not 8 factors above 0"),
        ("phi3", dict.fromkeys(LENGTHS, np.ones(8, np.float32)), "phi3.rope.scaling.original_context_length"),
        (
            "phi3",
            dict.fromkeys((*LENGTHS, "rope_freqs.weight"), np.ones(8, np.float32)),
            "phi3.rope.scaling.type",
        ),
        ("qwen2", {"blk.1.attn_output.bias": np.zeros(64, np.float32)}, "blk.1.attn_output.bias"),
        ("qwen3", {"blk.0.ffn_gate_exps.weight": np.zeros((4, 32, 64), np.float32)}, "blk.0.ffn_gate_exps.weight"),
        ("mixtral", {"blk.0.ffn_up_exps.weight": np.zeros((3, 96, 64), np.float32)}, "blk.0.ffn_"),
    ],
)
def test_a_tensor_that_is_not_the_models_is_named(
    tmp_path: Path, model_type: str, tensors: dict[str, np.ndarray], named: str, file_of: Callable[[str], GgufFile]
) -> None:
    assert named in refusal(tmp_path, file_of(model_type).changed({}, tensors))


def test_weights_that_the_dtype_cannot_hold_are_named(tmp_path: Path, file_of: Callable[[str], GgufFile]) -> None:
    file = file_of("llama").changed({}, {"output_norm.weight": np.full(64, 1e5, np.float32)})
    assert "output_norm.weight has numbers that are not finite in float16" in refusal(tmp_path, file, dtype="float16")


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path, file_of: Callable[[str], GgufFile]) -> None:
    content = file_of("llama").write(tmp_path / "whole.gguf").read_bytes()
    data = len(content) - sum(tensor.nbytes for tensor in file_of("llama").tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 5, 20, 100, 1000, data // 2, data - 100, data, data + 1000, len(content) - 1):
        cut.write_bytes(content[:size])
        with pytest.raises(RefusedFile, match="no GGUF file that can be read"):
            convert_gguf(cut, tmp_path / "out", "float32")


def test_a_tensor_that_lies_in_another_is_refused(tmp_path: Path, file_of: Callable[[str], GgufFile]) -> None:
    file = file_of("llama").write(tmp_path / "tiny.gguf")
    content = file.read_bytes()
    name = b"blk.0.attn_q.weight"
    offset = content.index(name) + len(name) + 4 + 2 * 8 + 4
    file.write_bytes(content[:offset] + (64).to_bytes(8, "little") + content[offset + 8 :])
    with pytest.raises(RefusedFile, match=r"blk\.0\.attn_q\.weight begins at byte"):
        convert_gguf(file, tmp_path / "out", "float32")


@pytest.mark.parametrize(
    ("offset", "number", "named"),
    [
        (4 + 2 * 8, 2, r"blk\.0\.ffn_down\.weight begins at byte"),  # the field is the type: Q4_0
        (4 + 2 * 8, 1, r"blk\.0\.ffn_down\.weight begins at byte"),  # F16
        (4 + 2 * 8, 999, r"999\) is not a valid"),
        (4, 96, r"blk\.0\.ffn_down\.weight begins at byte"),  # the field is the first size
        (4, 0, r"blk\.0\.ffn_down\.weight begins at byte"),
        (4, 1 << 31, "cannot reshape"),
        (0, 9, "it ends too early"),  # the field is the number of sizes
    ],
)
def test_a_tensor_that_is_described_wrongly_is_refused(
    tmp_path: Path, offset: int, number: int, named: str, file_of: Callable[[str], GgufFile]
) -> None:
    file = file_of("llama").write(tmp_path / "tiny.gguf")
    content, name = file.read_bytes(), b"blk.0.ffn_up.weight"
    place = content.index(name) + len(name) + offset
    file.write_bytes(content[:place] + number.to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(RefusedFile, match=named):
        convert_gguf(file, tmp_path / "out", "float32")


def test_versions_and_byte_orders_that_are_not_read_are_refused(
    tmp_path: Path, file_of: Callable[[str], GgufFile]
) -> None:
    file = file_of("llama").write(tmp_path / "tiny.gguf")
    content = file.read_bytes()
    for version in (1, 4):
        file.write_bytes(content[:4] + version.to_bytes(4, "little") + content[8:])
        with pytest.raises(RefusedFile, match=f"version {version}"):
            convert_gguf(file, tmp_path / "out", "float32")
    writer = gguf.GGUFWriter(file, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RefusedFile, match="byte order"):
        convert_gguf(file, tmp_path / "out", "float32")


def test_a_refused_file_is_one_line_at_the_start(tmp_path: Path, file_of: Callable[[str], GgufFile]) -> None:
    file = file_of("llama").changed({"llama.attention.clamp_kqv": 8.0}).write(tmp_path / "clamped.gguf")
    with pytest.raises(StartupError) as refused:
        resolve_model(str(file), dtype="float32", cache_dir=tmp_path / "cache")
    assert str(refused.value) == (
        "clamped.gguf could not be converted: llama.attention.clamp_kqv: 8.0 is not supported"
    )


# ---- tokens ---------------------------------------------------------------------------------------------------------

TEXTS = [
    "the other, and  2024 things",
    "   12\n\n  34\tThe IN'S they'LL 'the",
    "x=1;\r\n\r\n  an é ü 漢字<|end|>\n<|start|>a ",
    " lead and trail  ",
]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def isolated(split: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize(
    ("pre", "splits"),
    [
        (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("default", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ),
        ("llama-bpe", isolated(LLAMA3_SPLIT)),
        ("qwen2", isolated(LLAMA3_SPLIT.replace("{1,3}", ""))),
    ],
)
def test_text_is_split_as_the_file_says(
    tmp_path: Path, pre: str | None, splits: Any, file_of: Callable[[str], GgufFile]
) -> None:
    merges = [("Ġ", "Ġ"), ("Ġ", "2"), ("2", "0"), ("1", "2"), ("Ċ", "Ċ"), ("'", "L"), ("Ġ", "Ċ")]
    source = make_tokenizer(merges=merges)
    source.backend_tokenizer.pre_tokenizer = splits
    file = gguf_of(source_model("llama", vocab_size=len(source)), source)
    file = file.changed({"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, file))
    for text in TEXTS:
        assert tokenizer(text).input_ids == source(text).input_ids, text
        assert tokenizer.decode(source(text).input_ids) == source.decode(source(text).input_ids)


@pytest.mark.parametrize(
    ("keys", "begins"),
    [
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.add_bos_token": False}, False),
        ({}, False),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_prompts_begin_as_the_file_says(
    tmp_path: Path, keys: dict[str, Any], begins: bool, file_of: Callable[[str], GgufFile]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, file_of("llama").changed(keys)))
    assert (tokenizer("the")["input_ids"][0] == 1) is begins


def test_tokens_outside_the_bytes_alphabet_keep_their_ids(tmp_path: Path, file_of: Callable[[str], GgufFile]) -> None:
    file = file_of("llama")
    tokens, types = list(file.keys["tokenizer.ggml.tokens"]), list(file.keys["tokenizer.ggml.token_type"])
    tokens[END_ID], tokens[3], types[3] = "<｜end▁of▁sentence｜>", "  two  ", 4
    directory = converted(tmp_path, file.changed({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer("a<｜end▁of▁sentence｜>a  two  a").input_ids.count(END_ID) == 1
    assert 3 in tokenizer("a  two  a").input_ids
    assert tokenizer.eos_token_id == END_ID


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_sentencepiece_tokenizer_is_the_source_models(
    tmp_path: Path, adds_space: bool, file_of: Callable[[str], GgufFile]
) -> None:
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    merged = ["th", "the", "▁the", "▁a", "an", "in", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(letters))]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("a", "n"), ("i", "n"), ("▁", "▁")]
    source = LlamaTokenizer(
        vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=merges, add_prefix_space=adds_space
    )
    file = gguf_of(source_model("llama", vocab_size=len(tokens))).changed(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": adds_space,
        }
    )
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, file))
    for text in ("the man and the other", "  a  thin an", "é the</s>an", "the."):
        ids = source(text, add_special_tokens=False).input_ids
        assert tokenizer(text).input_ids == [1, *ids], text
        assert tokenizer.decode(ids) == source.decode(ids)


def test_a_gemma_tokenizer_finds_whole_what_its_file_defines(
    tmp_path: Path, file_of: Callable[[str], GgufFile]
) -> None:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    lines, spaces = ["\n", "\n\n", "<b>"], ["▁▁", "▁▁▁"]
    merged = ["th", "the", "▁the", "▁a", "an", "in"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,<>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = [*control, *lines, *spaces, *bytes_, *merged, *letters]
    merges = [("▁", "▁"), ("▁▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("a", "n"), ("i", "n")]
    source = GemmaTokenizer(vocab={token: token_id for token_id, token in enumerate(vocab)}, merges=merges)
    source.add_special_tokens({"additional_special_tokens": control[4:]})
    source.add_tokens(lines)
    normal = len(merged) + len(letters)
    file = gguf_of(source_model("gemma3_text", vocab_size=len(vocab))).changed(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.tokens": [token.replace("▁", " ") if token in spaces else token for token in vocab],
            "tokenizer.ggml.scores": [*[-1000.0] * (len(vocab) - normal), *(-float(rank) for rank in range(normal))],
            "tokenizer.ggml.token_type": [*[3] * 6, *[4] * 5, *[6] * 256, *[1] * normal],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.padding_token_id": 0,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    directory = converted(tmp_path, file)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ("the man and", " the  an   the", "<start_of_turn>in\n\n\nthe<end_of_turn>\n", "é <b>a</b>", "\n in"):
        ids = source(text, add_special_tokens=False).input_ids
        assert tokenizer(text).input_ids == [2, *ids], text
        assert tokenizer.decode(ids) == source.decode(ids) == text
    assert load_target(directory, device="cpu", dtype="float32", optimizes_modules=False).eos_token_ids == (1, 5)


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({"tokenizer.ggml.eot_token_id": 9}, (END_ID, 9)),
        ({"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 10}, (END_ID, 9, 10)),
        ({"tokenizer.ggml.eot_token_id": END_ID}, (END_ID,)),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.eot_token_id": 9}, (9, END_ID)),
        ({"tokenizer.ggml.eos_token_ids": [END_ID, 9, 10]}, (END_ID, 9, 10)),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.token_type": None}, (END_ID,)),  # by its name
    ],
)
def test_output_ends_with_every_end_that_the_file_names(
    tmp_path: Path, keys: dict[str, Any], ends: tuple[int, ...], file_of: Callable[[str], GgufFile]
) -> None:
    directory = converted(tmp_path, file_of("llama").changed(keys))
    assert load_target(directory, device="cpu", dtype="float32", optimizes_modules=False).eos_token_ids == ends


@pytest.mark.parametrize(
    ("names", "kind", "ends"),
    [
        pytest.param(("<|user|>", "<|endoftext|>", "<|end|>"), CONTROL, (END_ID, 3), id="phi-3"),
        pytest.param(("<|end|>", "<|return|>", "<|call|>"), CONTROL, (END_ID, 3), id="gpt-oss"),
        pytest.param(("<|end|>", "<|return|>", "<|message|>"), CONTROL, (END_ID,), id="no call"),
        pytest.param(("<|eom_id|>", "<|end_of_text|>", "<|eot_id|>"), CONTROL, (END_ID, 0, 3), id="llama 3"),
        pytest.param(("<|im_start|>", "<|endoftext|>", "<|im_end|>"), USER_DEFINED, (END_ID, 3), id="qwen"),
        pytest.param(("<EOT>", "</s>", "<|end|>"), NORMAL, (END_ID,), id="ordinary text"),
    ],
)
def test_output_ends_with_special_tokens_whose_names_are_those_of_ends(
    tmp_path: Path, names: Sequence[str], kind: int, ends: tuple[int, ...], file_of: Callable[[str], GgufFile]
) -> None:
    file = file_of("llama")
    tokens, types = ([*file.keys[f"tokenizer.ggml.{key}"]] for key in ("tokens", "token_type"))
    for token_id, name in zip((0, END_ID, 3), names, strict=True):
        tokens[token_id], types[token_id] = name, kind
    directory = converted(tmp_path, file.changed({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}))
    assert load_target(directory, device="cpu", dtype="float32", optimizes_modules=False).eos_token_ids == ends
