"""Greedy output equals transformers' `generate`, token for token, in every mode (A3, I12)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.model.sampling_params import ResolvedSampling
from common.model.target import TargetModel
from tests.conftest import MakePair
from tests.support.models import ARCHITECTURES
from tests.support.pair import PairOptions

NEW_TOKENS = 24
PROMPT_LENS = (1, 2, 15, 16, 17, 31, 40, 63, 64, 65, 70, 90, 100, 129, 130, 150)


def prompts() -> list[list[int]]:
    numbers = random.Random(11)
    return [[numbers.randrange(10, 250) for _ in range(length)] for length in PROMPT_LENS]


@cache
def reference(directory: Path) -> list[list[int]]:
    """`generate`'s tokens for every prompt. Raises AssertionError where the choice is nearly a tie: pick another seed."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
        gaps = [float(step.topk(2).values[0].diff().abs()) for step in generated.logits]
        assert min(gaps) > 1e-4, "the reference nearly ties"
        outputs.append(generated.sequences[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("mode", ["alone", "crowd"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_equal_generate(
    architecture: str,
    mode: str,
    overlap: bool,
    chunk_tokens: int,
    make_pair: MakePair,
    tiny_target: Callable[[str], TargetModel],
    tiny_model_dir: Callable[[str], Path],
) -> None:
    pair = make_pair(tiny_target(architecture), PairOptions(overlap=overlap, chunk_tokens=chunk_tokens))
    wanted = reference(tiny_model_dir(architecture))
    sampling = ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0)
    for number, prompt in enumerate(prompts()):
        pair.submit(str(number), prompt, sampling)
        if mode == "alone":
            pair.run()
        else:
            for _ in range(number % 3):
                pair.step()  # staggered arrivals
    pair.run()
    for number, tokens in enumerate(wanted):
        assert pair.outcomes[str(number)].token_ids == tokens, f"prompt {number}"
    if mode == "crowd":
        assert max(step.batch_size for step in pair.decode_steps) >= 8, "the requests did not run together"
    num_chunks = sum(step.batch_size for step in pair.prefill_steps)
    assert num_chunks >= sum(-(-length // chunk_tokens) for length in PROMPT_LENS)
