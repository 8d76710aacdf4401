"""Tests that the same seed gives the same tokens and log-probabilities through two processes and gRPC as in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton import Completion
from baton.events import PositionLogprobs
from baton.local_pair import LocalPair
from baton.requests import SamplingOptions
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling, TokenLogprobs
from tests.support.pair import MakePair, Outcome, PairOptions
from tests.support.running_pair import BOUND_S, RunningPair, running_pair

NUM_REQUESTS = 12
NEW_TOKENS = 20
TOLERANCE = 1e-4
KINDS: tuple[SamplingOptions, ...] = (
    {"temperature": 0.75, "logprobs": 3},
    {"temperature": 1.25, "top_k": 40, "top_p": 0.875, "min_p": 0.03125},
    {"temperature": 1.0, "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {20: 4.0, 30: -4.0}, "logprobs": 0},
)
"""Sampling options whose numbers a float on the wire holds exactly."""


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def pair(
    request: pytest.FixtureRequest,
    plain_pair: RunningPair,
    tiny_model_dir: Callable[[str], Path],
    forked: Callable[..., LocalPair],
) -> Iterator[RunningPair]:
    if request.param:
        yield plain_pair
        return
    with running_pair(tiny_model_dir("llama"), kind=forked, decode_args=["--disabled-fast-paths=overlap"]) as running:
        yield running


def prompt(number: int) -> list[int]:
    return [10 + (number * 31 + place * (number + 7)) % 240 for place in range(1 + number * 13)]


def sampling(number: int) -> SamplingOptions:
    return {
        "seed": (1 << 63) + number,
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        **KINDS[number % len(KINDS)],
    }


def choice_index(number: int) -> int | None:
    return (None, 0, 1, 127)[number // len(KINDS) % 4]


def resolved(options: SamplingOptions) -> ResolvedSampling:
    """Returns the options in the form into which the edge resolves them for the engine."""
    values = {name: value for name, value in options.items() if name not in ("ignore_eos", "logprobs", "logit_bias")}
    bias = options.get("logit_bias") or {}
    return ResolvedSampling(
        **values,  # type: ignore[arg-type]  # the names are the same
        logit_bias=tuple(sorted(bias.items())),
        num_logprobs=options.get("logprobs"),
    )


@pytest.fixture
def in_one_process(make_pair: MakePair, tiny_target: Callable[[str], TargetModel]) -> list[Outcome]:
    pair = make_pair(tiny_target("llama"), PairOptions(overlap=False))
    outcomes = [
        pair.submit(str(n), prompt(n), resolved(sampling(n)), choice_index=choice_index(n) or 0)
        for n in range(NUM_REQUESTS)
    ]
    pair.run(bound_s=BOUND_S)
    return outcomes


def test_two_processes_sample_what_one_does(pair: RunningPair, in_one_process: list[Outcome]) -> None:
    def complete(number: int) -> Completion:
        return pair.client.complete(
            token_ids=prompt(number), choice_index=choice_index(number), timeout_s=BOUND_S, **sampling(number)
        )

    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        completions = list(clients.map(complete, range(NUM_REQUESTS)))
    for number, (completion, expected) in enumerate(zip(completions, in_one_process, strict=True)):
        assert list(completion.token_ids) == expected.token_ids, f"request {number}"
        assert len(completion.token_ids) == NEW_TOKENS
        assert len(completion.logprobs) == (0 if sampling(number).get("logprobs") is None else NEW_TOKENS)
        for position, reference in zip(completion.logprobs, expected.logprobs, strict=True):
            assert_equal(position, reference)


def assert_equal(position: PositionLogprobs, reference: TokenLogprobs) -> None:
    assert position.chosen.logprob == pytest.approx(reference.chosen, abs=TOLERANCE)
    assert tuple(entry.token_id for entry in position.top) == reference.top_ids
    assert [entry.logprob for entry in position.top] == pytest.approx(list(reference.top_values), abs=TOLERANCE)
