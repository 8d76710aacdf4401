"""Tests that greedy output of a model with `longrope` equals transformers' `generate`, token for token, if transformers
is made to rotate all sequences by the factors that the served context chooses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from common.model.loader import load_target
from tests.support.greedy_parity import NEW_TOKENS, PROMPT_LENS, check_tokens_equal_generate, prompts, reference
from tests.support.models import save_tiny_model
from tests.support.pair import MakePair, PairOptions
from tests.support.reference import generate_greedily

CONTEXT, CHUNK_TOKENS = 512, 16


def save_phi3(directory: Path, original: int) -> Path:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [2.0 + 3.0 * i for i in range(8)],
    }
    return save_tiny_model(
        directory, "phi3", original_max_position_embeddings=original, rope_parameters={**rope, "rope_theta": 10000.0}
    )


def with_long_factors(directory: Path, to: Path) -> Path:
    """Copies a model, and lets it rotate short sequences by the long factors too."""
    shutil.copytree(directory, to)
    config = json.loads((to / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = config["rope_parameters"]["long_factor"]
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("crowd", [True, False])
def test_a_context_within_the_original_length_gives_the_tokens_of_transformers(
    crowd: bool, make_pair: MakePair, tmp_path: Path
) -> None:
    directory = save_phi3(tmp_path, CONTEXT)
    target = load_target(directory, device="cpu", dtype="float32", max_context_tokens=CONTEXT)
    pair = make_pair(target, PairOptions(context_tokens=CONTEXT, chunk_tokens=CHUNK_TOKENS))
    check_tokens_equal_generate(pair, directory, crowd=crowd, chunk_tokens=CHUNK_TOKENS)


@pytest.mark.parametrize("crowd", [True, False])
def test_a_longer_context_gives_the_tokens_of_the_long_factors(
    crowd: bool, make_pair: MakePair, tmp_path: Path
) -> None:
    original = 40
    directory = save_phi3(tmp_path / "model", original)
    fixed = with_long_factors(directory, tmp_path / "fixed")
    target = load_target(directory, device="cpu", dtype="float32", max_context_tokens=CONTEXT)
    pair = make_pair(target, PairOptions(context_tokens=CONTEXT, chunk_tokens=CHUNK_TOKENS))
    check_tokens_equal_generate(pair, fixed, crowd=crowd, chunk_tokens=CHUNK_TOKENS)
    of_transformers = [generate_greedily(directory, prompt, NEW_TOKENS).token_ids for prompt in prompts()]
    of_long_factors = reference(fixed, 260, NEW_TOKENS, "eager")
    is_long = [length > original for length in PROMPT_LENS]
    assert [ours == theirs for ours, theirs in zip(of_long_factors, of_transformers, strict=True)] == is_long
