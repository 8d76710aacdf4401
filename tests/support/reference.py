"""The expected tokens and log-probabilities after a prompt, and of the prompt itself, as transformers computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

MIN_GAP = 1e-4
"""Smallest gap between the two best logits. Below it greedy decoding is not decisive, so a test must pick another
prompt.
"""


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy output of transformers. `logprobs` [tokens, vocab] are the model's own, before any logits processor."""

    token_ids: list[int]
    logprobs: Tensor


@cache
def _model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def generate_greedily(directory: Path, prompt: Sequence[int], num_tokens: int, **options: Any) -> Reference:
    """Runs `generate` greedily with these options, for at most `num_tokens`. Raises AssertionError where the two best
    choices nearly tie.
    """
    ids = torch.tensor([list(prompt)])
    generated = _model(directory).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **{"eos_token_id": None, **options},
    )
    gaps = [float(step.topk(2).values[0].diff().abs()) for step in generated.scores]
    assert min(gaps) > MIN_GAP, "the reference nearly ties"
    logprobs = torch.log_softmax(torch.cat(generated.logits), dim=-1)
    return Reference(generated.sequences[0, len(prompt) :].tolist(), logprobs)


def prompt_logprobs(directory: Path, prompt: Sequence[int]) -> Tensor:
    """Returns the log-probabilities of all tokens at each position of the prompt but the first: [tokens - 1, vocab]."""
    with torch.inference_mode():
        logits = _model(directory)(torch.tensor([list(prompt)])).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)
