"""Tests that a pair with KV in FP8 gives the tokens of transformers with rounded KV, token for token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from common.attention.choice import AttentionKind
from common.kv.layer_group import KV_FP8
from common.model.loader import load_target
from common.wire.handoff import Frame, KvSegment
from tests.support.fp8_kv import fp8_attention
from tests.support.greedy_parity import check_tokens_equal_generate, prompts, reference
from tests.support.models import save_tiny_model
from tests.support.pair import MakePair, PairOptions
from tests.support.quantized import QuantizedModel, save_kv_scales, save_quantized_model

CHUNK_TOKENS = 16
SCALES = [(0.05, 0.02), (0.003, 0.4)]
"""Scales of the keys and the values of two layers. The second layer's keys are cut at its largest number."""


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "kernels") for family in ("llama", "gemma2", "gemma3_text", "gpt_oss", "mixtral")),
        ("llama", "torch"),
    ],
)
def test_tokens_equal_those_of_rounded_kv(
    family: str, attention: AttentionKind, make_pair: MakePair, tiny_model_dir: Callable[[str], Path]
) -> None:
    directory = tiny_model_dir(family)
    model = load_target(directory, device="cpu", dtype="float32", kv_dtype="fp8_e4m3", attention=attention)
    assert {group.dtype for group in model.layer_groups} == {KV_FP8}
    pair = make_pair(model, PairOptions(chunk_tokens=CHUNK_TOKENS))
    num_bytes: Counter[str] = Counter()

    def count(frame: Frame) -> Sequence[Frame]:
        if isinstance(frame, KvSegment):
            num_bytes[frame.layer_group] += frame.num_bytes
        return (frame,)

    pair.tamper = count
    check_tokens_equal_generate(pair, directory, crowd=True, chunk_tokens=CHUNK_TOKENS, attention=fp8_attention())
    group = model.layer_group
    sent = sum(map(len, prompts())) * group.num_layers * 2 * group.num_heads * group.head_dim
    assert num_bytes["target"] == sent, "a number of KV takes one byte"


@pytest.fixture(params=["llama", "gemma3_text"])
def with_scales(request: pytest.FixtureRequest, tmp_path: Path) -> QuantizedModel:
    """A model with weights and KV in FP8. Each layer has scales of its own, also where one of them has a window."""
    source = save_tiny_model(tmp_path / "source", request.param, seed=1)
    model = save_quantized_model(tmp_path, "compressed-tensors-fp8", source)
    save_kv_scales(model.directory, SCALES)
    return model


def test_a_checkpoint_says_that_its_kv_is_in_fp8_and_with_which_scales(
    make_pair: MakePair, with_scales: QuantizedModel
) -> None:
    whole_dir = with_scales.whole_dir
    model = load_target(with_scales.directory, device="cpu", dtype="float32")
    assert model.layer_group.dtype == KV_FP8
    pair = make_pair(model, PairOptions(chunk_tokens=CHUNK_TOKENS))
    check_tokens_equal_generate(pair, whole_dir, crowd=True, chunk_tokens=CHUNK_TOKENS, attention=fp8_attention(SCALES))
    tokens = [reference(whole_dir, 260, 24, name) for name in (fp8_attention(SCALES), fp8_attention(), None)]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0], "the scales, or the rounding, change nothing"


def test_its_kv_may_be_unquantised(make_pair: MakePair, with_scales: QuantizedModel) -> None:
    model = load_target(with_scales.directory, device="cpu", dtype="float32", kv_dtype="unquantized")
    assert model.layer_group.dtype == "float32"
    pair = make_pair(model, PairOptions(chunk_tokens=CHUNK_TOKENS))
    check_tokens_equal_generate(pair, with_scales.whole_dir, crowd=True, chunk_tokens=CHUNK_TOKENS)
