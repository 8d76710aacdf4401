"""Compares a pair's greedy output with transformers' `generate`. All devices share this check."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from common.sampling.params import ResolvedSampling
from tests.support.pair import InProcessPair

NEW_TOKENS = 24
NUM_STAGGERED = 6
_PAD_ID = 0
PROMPT_LENS = (1, 2, 15, 16, 17, 31, 40, 63, 64, 65, 70, 90, 100, 129, 130, 150)


@cache
def prompts(vocab_size: int = 260) -> tuple[tuple[int, ...], ...]:
    numbers = random.Random(11)
    return tuple(tuple(numbers.randrange(10, vocab_size - 10) for _ in range(length)) for length in PROMPT_LENS)


@cache
def reference(directory: Path, vocab_size: int, num_tokens: int, attention: str) -> list[list[int]]:
    """Returns `generate`'s greedy tokens for every prompt. The prompts form one batch, padded on the left. Raises
    AssertionError where the two best choices nearly tie.

    `attention` names an implementation that transformers knows.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()
    batch = prompts(vocab_size)
    width = max(map(len, batch))
    generated = model.generate(
        torch.tensor([[_PAD_ID] * (width - len(ids)) + list(ids) for ids in batch]),
        attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch]),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=_PAD_ID,
    )
    gaps = [float(step.topk(2).values.diff(dim=-1).abs().min()) for step in generated.logits]
    assert min(gaps) > 1e-4, "the reference nearly ties"
    tokens: list[list[int]] = generated.sequences[:, width:].tolist()
    return tokens


def check_tokens_equal_generate(
    pair: InProcessPair,
    model_dir: Path,
    *,
    crowd: bool,
    chunk_tokens: int,
    vocab_size: int = 260,
    num_tokens: int = NEW_TOKENS,
    alone_step: int = 1,
    min_together: int = 8,
    attention: str = "eager",
) -> None:
    """Asserts that the pair's greedy tokens equal `generate`'s, with the `attention` of this name.

    With `crowd` all prompts run together, and at least `min_together` rows must have shared a step. Otherwise every
    `alone_step`-th prompt runs alone, one after the other.
    """
    sampling = ResolvedSampling(seed=0, max_tokens=num_tokens, temperature=0.0)
    numbers = range(0, len(PROMPT_LENS), 1 if crowd else alone_step)
    for number in numbers:
        prompt = prompts(vocab_size)[number]
        pair.submit(str(number), prompt, sampling)
        if not crowd:
            pair.run()
            continue
        for _ in range(number % 3 if number < NUM_STAGGERED else 0):
            pair.step()
    if crowd:
        pair.finish_prefill()  # the rest is merged in one step, among those that came before
    pair.run()
    wanted = reference(model_dir, vocab_size, num_tokens, attention)
    for number in numbers:
        assert pair.outcomes[str(number)].token_ids == wanted[number], f"prompt {number}"
    if crowd:
        num_together = max(step.batch_size for step in pair.decode_steps)
        assert num_together >= min_together, f"only {num_together} requests ran together"
    num_chunks = sum(step.batch_size for step in pair.prefill_steps)
    assert num_chunks >= sum(-(-PROMPT_LENS[number] // chunk_tokens) for number in numbers), "prompts were not cut"
