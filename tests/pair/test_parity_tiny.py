"""Tests that greedy output equals transformers' `generate`, token for token (field rule A3, invariant I12): for every
architecture and every format of weights and KV, in every mode, with and without drafts, with fused kernels and with
PyTorch operators.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.attention.choice import AttentionKind
from common.draft.paged_head import PagedHead
from common.kv.layer_group import KV_FP8
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, KvSegment
from tests.support.draft_heads import save_copy_head
from tests.support.drafted import SHAPES, Counts, Drafted, load_drafted, tokens_per_step
from tests.support.fp8_kv import fp8_attention
from tests.support.fused import fused
from tests.support.greedy_parity import NEW_TOKENS, PROMPT_LENS, check_tokens_equal_generate, prompts, reference
from tests.support.loading import load_target
from tests.support.models import ARCHITECTURES, SMALL_VOCAB_SIZE, save_last_token_model, save_tiny_model
from tests.support.pair import MakePair, PairOptions
from tests.support.quantized import FORMATS, QuantizedModel, save_kv_scales, save_quantized_model
from tests.support.reference import generate_greedily

thorough = pytest.mark.thorough

CHUNKS = (16, 64, 512)
MODES = [(True, True), (False, False), (True, False), (False, True)]
"""Whether the prompts come at once, and whether steps overlap."""
IN_GATE = ("llama", "gemma3_text", "qwen3_moe")
"""The demo model's family, one with windows, and one with experts."""
MAX_TOKENS = 4096
"""The most tokens in one fused forward: enough for all prompts at once."""


def _cases() -> Iterator[Any]:
    """Yields each architecture in every mode, and each mode with every chunk size. In the gate are two modes of a few
    architectures.
    """
    for number, architecture in enumerate(ARCHITECTURES):
        for place, mode in enumerate(MODES):
            marks = [] if architecture in IN_GATE and place < 2 else [thorough]
            yield pytest.param(architecture, *mode, CHUNKS[(number + place) % len(CHUNKS)], marks=marks)


@pytest.mark.parametrize(("architecture", "crowd", "overlap", "chunk_tokens"), list(_cases()))
def test_tokens_equal_generate(
    architecture: str,
    crowd: bool,
    overlap: bool,
    chunk_tokens: int,
    make_pair: MakePair,
    tiny_target: Callable[[str], TargetModel],
    tiny_model_dir: Callable[[str], Path],
) -> None:
    pair = make_pair(tiny_target(architecture), PairOptions(overlap=overlap, chunk_tokens=chunk_tokens))
    directory = tiny_model_dir(architecture)
    check_tokens_equal_generate(pair, directory, crowd=crowd, chunk_tokens=chunk_tokens, alone_step=3)


# ---- weights, positions and KV ---------------------------------------------------------------------------------------


@thorough
@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_of_quantised_weights_equal_generate(
    kind: str, make_pair: MakePair, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where transformers computes something else from the quantised weights, it generates from those they stand for."""
    model = save_quantized_model(tmp_path, kind, tiny_model_dir(FORMATS[kind].architecture))
    pair = make_pair(load_target(model.directory, device="cpu", dtype="float32"))
    directory = model.directory if FORMATS[kind].is_reference else model.whole_dir
    check_tokens_equal_generate(pair, directory, crowd=True, chunk_tokens=64)


@thorough
@pytest.mark.parametrize("original", [512, 40])
def test_the_served_context_chooses_the_factors_of_longrope(original: int, make_pair: MakePair, tmp_path: Path) -> None:
    """Transformers rotates short sequences by other factors than long ones. A model that is served with a context above
    its original length always rotates by the long ones.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [2.0 + 3.0 * i for i in range(8)],
    }
    directory = save_tiny_model(
        tmp_path / "model", "phi3", original_max_position_embeddings=original, rope_parameters=rope
    )
    expected_dir = directory
    is_long = [length > original for length in PROMPT_LENS]
    if any(is_long):
        expected_dir = shutil.copytree(directory, tmp_path / "long")
        config = json.loads((expected_dir / "config.json").read_text())
        config["rope_parameters"]["short_factor"] = rope["long_factor"]
        (expected_dir / "config.json").write_text(json.dumps(config))
        of_transformers = [generate_greedily(directory, prompt, NEW_TOKENS).token_ids for prompt in prompts()]
        of_long_factors = reference(expected_dir, 260, NEW_TOKENS, "eager")
        assert [one == other for one, other in zip(of_long_factors, of_transformers, strict=True)] == is_long
    target = load_target(directory, device="cpu", dtype="float32", max_context_tokens=512)
    pair = make_pair(target, PairOptions(context_tokens=512, chunk_tokens=16))
    check_tokens_equal_generate(pair, expected_dir, crowd=True, chunk_tokens=16)


@thorough
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "kernels") for family in ("llama", "gemma2", "gemma3_text", "gpt_oss", "mixtral")),
        ("llama", "torch"),
    ],
)
def test_tokens_of_fp8_kv_equal_those_of_rounded_kv(
    family: str, attention: AttentionKind, make_pair: MakePair, tiny_model_dir: Callable[[str], Path]
) -> None:
    directory = tiny_model_dir(family)
    model = load_target(directory, device="cpu", dtype="float32", kv_dtype="fp8_e4m3", attention=attention)
    assert {group.dtype for group in model.layer_groups} == {KV_FP8}
    pair = make_pair(model, PairOptions(chunk_tokens=16))
    num_bytes: Counter[str] = Counter()

    def count(frame: Frame) -> Sequence[Frame]:
        if isinstance(frame, KvSegment):
            num_bytes[frame.layer_group] += frame.num_bytes
        return (frame,)

    pair.tamper = count
    check_tokens_equal_generate(pair, directory, crowd=True, chunk_tokens=16, attention=fp8_attention())
    group = model.layer_group
    sent = sum(map(len, prompts())) * group.num_layers * 2 * group.num_heads * group.head_dim
    assert num_bytes["target"] == sent, "a number of KV takes one byte"


KV_SCALES = [(0.05, 0.02), (0.003, 0.4)]
"""Scales of the keys and the values of two layers. The second layer's keys are cut at its largest number."""


@thorough
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_checkpoint_says_that_its_kv_is_in_fp8_and_with_which_scales(
    family: str, make_pair: MakePair, tmp_path: Path
) -> None:
    """Each layer has scales of its own, also where one of them has a window. The KV may be unquantised all the same."""
    source = save_tiny_model(tmp_path / "source", family, seed=1)
    saved: QuantizedModel = save_quantized_model(tmp_path, "compressed-tensors-fp8", source)
    save_kv_scales(saved.directory, KV_SCALES)
    scaled = fp8_attention(KV_SCALES)
    for kv_dtype, stored_as, attention in (("auto", KV_FP8, scaled), ("unquantized", "float32", "eager")):
        model = load_target(saved.directory, device="cpu", dtype="float32", kv_dtype=kv_dtype)  # type: ignore[arg-type]
        assert model.layer_group.dtype == stored_as
        pair = make_pair(model, PairOptions(chunk_tokens=16))
        check_tokens_equal_generate(pair, saved.whole_dir, crowd=True, chunk_tokens=16, attention=attention)
    tokens = [reference(saved.whole_dir, 260, NEW_TOKENS, name) for name in (scaled, fp8_attention(), "eager")]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0], "the scales, or the rounding, change nothing"


# ---- with drafts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "shape", "chunk_tokens"),
    [
        pytest.param(
            family,
            ("chain-4", "tree-4x3-15")[number % 2],
            (16, 512)[number // 2 % 2],
            marks=[] if family in IN_GATE else [thorough],
        )
        for number, family in enumerate(ARCHITECTURES)
    ],
)
def test_tokens_of_every_family_equal_generate_with_drafts(
    family: str, shape: str, chunk_tokens: int, make_pair: MakePair, tmp_path: Path
) -> None:
    weights = {"context_weight": 0.05, "mlp_weight": 0.05}
    target_dir = save_last_token_model(tmp_path / "target", architecture=family, **weights)
    head_dir = save_copy_head(tmp_path / "head", target_dir=target_dir, family="eagle3")
    drafted = load_drafted(target_dir, head_dir)
    pair = make_pair(drafted.target, PairOptions(chunk_tokens=chunk_tokens, **SHAPES[shape]), draft=drafted.head)
    check_tokens_equal_generate(pair, target_dir, crowd=True, chunk_tokens=chunk_tokens, vocab_size=SMALL_VOCAB_SIZE)
    counts = Counts.of(pair.outcomes.values())
    assert counts.num_accepted > 0 and counts.num_rejected > 0, counts


@pytest.mark.parametrize(
    ("head", "shape", "fuses", "mode"),
    [
        ("copying", "chain-4", False, 0),
        ("guessing", "tree-4x3-15", False, 1),
        pytest.param("copying", "chain-4", True, 0, marks=thorough),
        pytest.param("copying", "tree-4x3-15", False, 1, marks=thorough),
        pytest.param("guessing", "tree-2x4-9", True, 1, marks=thorough),
        pytest.param("copying", "chain-1", False, 2, marks=thorough),
        pytest.param("copying", "tree-2x4-9", True, 3, marks=thorough),
        pytest.param("copying_layers", "chain-5", False, 0, marks=thorough),
        pytest.param("guessing", "chain-4", False, 2, marks=thorough),
        pytest.param("guessing_layers", "chain-5", False, 3, marks=thorough),
    ],
)
def test_a_head_that_is_always_right_is_used_and_a_random_one_is_not_believed(
    head: str, shape: str, fuses: bool, mode: int, make_pair: MakePair, request: pytest.FixtureRequest
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    crowd, overlap = MODES[mode]
    options = PairOptions(overlap=overlap, chunk_tokens=CHUNKS[mode % len(CHUNKS)], **SHAPES[shape])
    with ExitStack() as stack:

        def own_models() -> tuple[TargetModel, PagedHead | None]:
            if not fuses:
                return drafted.target, drafted.head
            models = load_drafted(drafted.directory, drafted.head_directory, fuses=True)
            return stack.enter_context(fused(models.target, models.head, max_tokens=MAX_TOKENS))

        (target, own_head), (prefill_model, prefill_draft) = own_models(), own_models()
        pair = make_pair(target, options, draft=own_head, prefill_model=prefill_model, prefill_draft=prefill_draft)
        check_tokens_equal_generate(
            pair,
            drafted.directory,
            crowd=crowd,
            chunk_tokens=options.chunk_tokens,
            vocab_size=SMALL_VOCAB_SIZE if head.startswith("copying") else 260,
            alone_step=3,
        )
        pair.settle()
    if head.startswith("copying"):
        assert tokens_per_step(pair) > 0.9 * options.spec_info.max_accept_len, "the drafts were not used"
    else:
        assert tokens_per_step(pair) < 1.5, "a random head was believed"


@pytest.mark.parametrize("shape", [pytest.param("chain-4", marks=thorough), "tree-4x3-15"])
def test_tokens_of_a_target_with_windows_equal_generate_where_some_drafts_are_right(
    shape: str, leaning_windows: Drafted, make_pair: MakePair
) -> None:
    """The target's tokens depend on the KV of all positions."""
    pair = make_pair(leaning_windows.target, PairOptions(**SHAPES[shape]), draft=leaning_windows.head)
    directory = leaning_windows.directory
    check_tokens_equal_generate(pair, directory, crowd=True, chunk_tokens=64, vocab_size=SMALL_VOCAB_SIZE)
    counts = Counts.of(pair.outcomes.values())
    assert counts.num_accepted > 50 and counts.num_rejected > 50, counts


@pytest.mark.parametrize(
    ("shape", "overlap"),
    [
        ("tree-4x3-15", True),
        *(
            pytest.param(*each, marks=thorough)
            for each in (("tree-4x3-15", False), ("chain-5", True), ("chain-5", False))
        ),
    ],
)
def test_a_request_may_fill_the_context_and_the_pool(
    shape: str, overlap: bool, copying: Drafted, make_pair: MakePair
) -> None:
    """Drafts after the last token have slots of their own, and no step is launched merely to verify them."""
    sizes = PairOptions(overlap=overlap, context_tokens=64, **SHAPES[shape])
    options = replace(sizes, decode_tokens=64 + sizes.spec_info.num_slots - 1)
    plain, speculating = make_pair(copying.target, options), make_pair(copying.target, options, draft=copying.head)
    for max_tokens in range(20, 26):  # every number of tokens that the last step may need
        sampling = ResolvedSampling(seed=0, max_tokens=max_tokens, temperature=0.0)
        num_steps = len(speculating.decode_steps)
        outcomes = []
        for pair in (plain, speculating):
            prompt = [4 + i % 50 for i in range(64 - max_tokens)]
            outcomes.append(pair.submit(f"of {max_tokens}", prompt, sampling))
            pair.run()
            pair.settle()
        assert outcomes[0].token_ids == outcomes[1].token_ids
        assert len(outcomes[0].token_ids) == max_tokens
        assert speculating.decode.load().num_retractions == 0
        num_steps = len(speculating.decode_steps) - num_steps
        assert num_steps <= -(-max_tokens // options.spec_info.max_accept_len) + overlap
