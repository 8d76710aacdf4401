"""Requests whose every token is known beforehand.

Each request ran alone in one process, without overlap and drafts. Greedy ones are also compared with transformers'
`generate`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.requests import SamplingOptions
from common.model.loader import load_target
from common.sampling.params import ResolvedSampling
from tests.support.pair import InProcessPair, PairOptions
from tests.support.reference import generate_greedily

LOGPROB_TOLERANCE = 1e-4
FIRST_ID = 4  # lower ids are special tokens
KINDS: tuple[SamplingOptions, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.875, "logprobs": 2},
    {"temperature": 0.0},
    {"temperature": 0.75, "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 1.25, "min_p": 0.03125, "top_k": 40, "logit_bias": {9: 2.0, 11: -3.0}, "logprobs": 0},
)
"""Sampling options whose numbers a float on the wire holds exactly."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its expected output. `logprobs` are those of the chosen tokens; it is empty where none are asked
    for.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingOptions
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def check(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_whole: bool) -> str | None:
        """Describes what is wrong with an output, or returns None. Unless it `is_whole`, only the beginning of the
        output arrived.
        """
        wanted = self.token_ids if is_whole else self.token_ids[: len(token_ids)]
        if tuple(token_ids) != wanted:
            return f"case {self.number}: tokens {list(token_ids)}, not {list(wanted)}"
        if len(logprobs) != (len(token_ids) if self.logprobs else 0):
            return f"case {self.number}: {len(logprobs)} log-probabilities for {len(token_ids)} tokens"
        pairs = zip(logprobs, self.logprobs, strict=False)
        if any(abs(value - known) > LOGPROB_TOLERANCE for value, known in pairs):
            return f"case {self.number}: other log-probabilities"
        return None


def make_cases(
    model_dir: Path,
    num_cases: int,
    *,
    prompt_lens: range = range(1, 25),
    output_lens: range = range(8, 73),
    seed: int = 0,
) -> list[Case]:
    """Cases of every prompt length, output length and kind of sampling. Greedy requests with nearly tied choices are
    left out.
    """
    draw = random.Random(seed)
    target = load_target(model_dir, device="cpu", dtype="float32")
    longest = prompt_lens[-1] + output_lens[-1]
    pair = InProcessPair(
        target,
        options=PairOptions(overlap=False, context_tokens=longest),
    )
    cases: list[Case] = []
    try:
        while len(cases) < num_cases:
            number = len(cases)
            prompt = [draw.randrange(FIRST_ID, target.vocab_size) for _ in range(draw.choice(prompt_lens))]
            sampling: SamplingOptions = {
                "max_tokens": draw.choice(output_lens),
                "ignore_eos": True,
                "seed": (1 << 62) + number,
                **KINDS[number % len(KINDS)],
            }
            if (case := _run(pair, model_dir, number, prompt, sampling)) is not None:
                cases.append(case)
    finally:
        pair.close()
    return cases


def _run(
    pair: InProcessPair, model_dir: Path, number: int, prompt: list[int], sampling: SamplingOptions
) -> Case | None:
    outcome = pair.submit(str(number), prompt, _resolved(sampling))
    pair.run()
    pair.outcomes.clear()
    assert outcome.error is None, outcome.error
    if sampling == {**sampling, **KINDS[0]} and not _is_generates(model_dir, prompt, outcome.token_ids):
        return None
    logprobs = tuple(entry.chosen for entry in outcome.logprobs)
    return Case(number, tuple(prompt), sampling, tuple(outcome.token_ids), logprobs)


def _is_generates(model_dir: Path, prompt: list[int], token_ids: list[int]) -> bool:
    """Whether `generate` is decisive for this prompt. Returns False where its choices nearly tie, and raises
    AssertionError where it gives other tokens.
    """
    try:
        reference = generate_greedily(model_dir, prompt, len(token_ids))
    except AssertionError:
        return False
    assert reference.token_ids == token_ids, f"{prompt}: generate gives {reference.token_ids}, not {token_ids}"
    return True


def _resolved(sampling: SamplingOptions) -> ResolvedSampling:
    """The options as the edge resolves them for the engine."""
    values = {name: value for name, value in sampling.items() if name not in ("ignore_eos", "logprobs", "logit_bias")}
    return ResolvedSampling(
        **values,  # type: ignore[arg-type]
        num_logprobs=sampling.get("logprobs"),
        logit_bias=tuple(sorted((sampling.get("logit_bias") or {}).items())),
    )
