"""Tests that tokens, log-probabilities and counts agree however a request ends (field rule A7), and that logits
processors act as in `generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from decode_service.messages import FinishAtStop, Finished, FinishReason
from tests.support.pair import InProcessPair, MakePair, Outcome, PairOptions
from tests.support.reference import Reference, generate_greedily

PROMPT = [31, 77, 150, 203, 48, 99, 121, 64, 180, 15, 220, 36, 142, 88, 59, 101, 240, 17, 73, 195]
NEW_TOKENS = 24
EOS = 2
Generate = Callable[..., Reference]


@pytest.fixture
def pair(make_pair: MakePair, tiny_target: Callable[[str], TargetModel]) -> InProcessPair:
    return make_pair(tiny_target("llama"), PairOptions(chunk_tokens=8))


@pytest.fixture(scope="module")
def generate(tiny_model_dir: Callable[[str], Path]) -> Generate:
    """A function that runs transformers' `generate` on PROMPT."""

    def run(num_tokens: int = NEW_TOKENS, **options: object) -> Reference:
        return generate_greedily(tiny_model_dir("llama"), PROMPT, num_tokens, **options)

    return run


@pytest.fixture(scope="module")
def plain(generate: Generate) -> list[int]:
    """The greedy tokens after PROMPT when nothing ends the output early."""
    return generate().token_ids


def first_new_at(tokens: list[int], at_least: int) -> int:
    """Returns the smallest index of `tokens`, from `at_least` on, whose token does not occur before it."""
    return next(place for place in range(at_least, len(tokens)) if tokens[place] not in tokens[:place])


def greedy(**changes: Any) -> ResolvedSampling:
    return replace(ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0, num_logprobs=3), **changes)


def run(pair: InProcessPair, sampling: ResolvedSampling) -> Outcome:
    outcome = pair.submit("request", PROMPT, sampling)
    pair.run()
    return outcome


def ending_of(outcome: Outcome) -> Finished:
    """Returns the event that ended the request, and asserts that all counts agree."""
    assert outcome.finished is not None, outcome.error
    assert outcome.finished.num_prompt_tokens == len(PROMPT)
    assert outcome.finished.num_completion_tokens == len(outcome.token_ids) == len(outcome.logprobs)
    return outcome.finished


def num_decode_steps(pair: InProcessPair) -> int:
    """Returns the number of decode forwards, including one still in flight when the output ended."""
    pair.step()
    return len(pair.decode_steps)


# ---- endings --------------------------------------------------------------------------------------------------------


Ending = tuple[dict[str, Any], list[int], FinishReason, int | None]


def endings(plain: list[int]) -> dict[str, Ending]:
    """Returns sampling options by name, with the tokens, the reason and the stop token of the output's end."""
    place = first_new_at(plain, at_least=4)
    at_eos, likely_eos = {"eos_token_ids": (plain[place],)}, {"logit_bias": ((EOS, 100.0),)}
    stop_tokens = {"eos_token_ids": (EOS,), "stop_token_ids": (5, plain[0])}
    lengths: dict[str, Ending] = {
        f"max_tokens {number}": ({"max_tokens": number}, plain[:number], FinishReason.LENGTH, None)
        for number in (1, 2, 3, NEW_TOKENS)
    }
    return lengths | {
        "the first token is eos": ({"eos_token_ids": (EOS,), **likely_eos}, [EOS], FinishReason.EOS, None),
        "the first token is a stop token": (stop_tokens, plain[:1], FinishReason.STOP_TOKEN, plain[0]),
        "eos in the middle": (at_eos, plain[: place + 1], FinishReason.EOS, None),
        "the last allowed token is eos": (
            {**at_eos, "max_tokens": place + 1},
            plain[: place + 1],
            FinishReason.EOS,
            None,
        ),
        "eos is ignored": ({"max_tokens": 5, **likely_eos}, [EOS] * 5, FinishReason.LENGTH, None),
    }


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_an_output_ends_where_it_should(
    overlap: bool, make_pair: MakePair, tiny_target: Callable[[str], TargetModel], plain: list[int]
) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(chunk_tokens=8, overlap=overlap))
    for name, (changes, token_ids, reason, stop_token_id) in endings(plain).items():
        num_before = num_decode_steps(pair)
        outcome = pair.submit(name, PROMPT, greedy(**changes))
        pair.run()
        assert outcome.token_ids == token_ids, name
        finished = ending_of(outcome)
        assert (finished.reason, finished.stop_token_id, finished.stop_string) == (reason, stop_token_id, None), name
        if "max_tokens" in changes or len(token_ids) == 1:
            num_steps = num_decode_steps(pair) - num_before
            assert num_steps == len(token_ids) - 1, f"{name}: a step ran whose tokens are dropped"


@pytest.mark.parametrize("min_tokens", [1, 6])
def test_no_end_comes_before_min_tokens(
    min_tokens: int, pair: InProcessPair, generate: Generate, plain: list[int]
) -> None:
    """No end token can be drawn, on prefill or decode, before `min_tokens` tokens are out."""
    ends = tuple(dict.fromkeys(plain[:3]))
    wanted = generate(min_new_tokens=min_tokens, eos_token_id=list(ends)).token_ids
    assert wanted != plain[: len(wanted)] and len(wanted) > min_tokens
    outcome = run(pair, greedy(eos_token_ids=ends[:1], stop_token_ids=ends[1:], min_tokens=min_tokens))
    assert outcome.token_ids == wanted
    ending_of(outcome)


def test_a_stop_that_the_edge_matched_cuts_the_counts_and_the_stream(pair: InProcessPair, plain: list[int]) -> None:
    outcome = pair.submit("request", PROMPT, greedy())
    pair.run(until=lambda: len(outcome.token_ids) >= 6)
    pair.post(FinishAtStop("request", 4, "stop"))
    pair.step_decode()
    num_delivered = len(outcome.token_ids)
    assert outcome.finished is not None
    assert (outcome.finished.reason, outcome.finished.stop_string) == (FinishReason.STOP_STRING, "stop")
    assert (outcome.finished.num_prompt_tokens, outcome.finished.num_completion_tokens) == (len(PROMPT), 4)
    pair.settle()
    assert outcome.token_ids == plain[:num_delivered], "nothing follows the terminal event"


def test_a_stop_matched_after_the_output_ended_is_ignored(pair: InProcessPair, plain: list[int]) -> None:
    outcome = run(pair, greedy(max_tokens=3))
    pair.post(FinishAtStop("request", 2, "stop"))
    pair.settle()
    assert ending_of(outcome).reason is FinishReason.LENGTH


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shaping", [{}, {"logit_bias": ((9, 4.0),), "repetition_penalty": 1.3}], ids=["plain", "shaped logits"]
)
def test_logprobs_of_first_and_later_tokens_are_the_unmodified_models(
    shaping: dict[str, object], pair: InProcessPair, tiny_model_dir: Callable[[str], Path]
) -> None:
    outcome = run(pair, greedy(num_logprobs=5, max_tokens=12, **shaping))
    ending_of(outcome)
    for place, (token, logprobs) in enumerate(zip(outcome.token_ids, outcome.logprobs, strict=True)):
        row = generate_greedily(tiny_model_dir("llama"), [*PROMPT, *outcome.token_ids[:place]], 1).logprobs[0]
        top = row.topk(5)
        assert logprobs.chosen == pytest.approx(float(row[token]), abs=1e-4)
        assert logprobs.top_ids == tuple(top.indices.tolist())
        assert logprobs.top_values == pytest.approx(top.values.tolist(), abs=1e-4)


def test_each_request_of_a_batch_gets_as_many_logprobs_as_it_asked_for(pair: InProcessPair) -> None:
    asked = {"none": None, "chosen alone": 0, "two": 2, "five": 5}
    outcomes = {name: pair.submit(name, PROMPT, greedy(num_logprobs=number)) for name, number in asked.items()}
    pair.run()
    assert outcomes["none"].logprobs == []
    for name in ("chosen alone", "two", "five"):
        assert len(outcomes[name].logprobs) == NEW_TOKENS
        assert all(len(entry.top_ids) == len(entry.top_values) == asked[name] for entry in outcomes[name].logprobs)


# ---- logits processors ----------------------------------------------------------------------------------------------


class PresenceAndFrequency(LogitsProcessor):
    """A logits processor with the presence and the frequency penalty as they are defined. It counts the tokens from
    index `start` on.
    """

    def __init__(self, presence: float, frequency: float, start: int = len(PROMPT)) -> None:
        self._presence = presence
        self._frequency = frequency
        self._start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self._start :], minlength=scores.shape[1])
        return scores - counts * self._frequency - (counts > 0) * self._presence


@pytest.mark.parametrize(("presence", "frequency"), [(6.0, 0.0), (0.0, 1.5)], ids=["presence", "frequency"])
def test_presence_and_frequency_penalties_equal_generate(
    presence: float, frequency: float, pair: InProcessPair, generate: Generate, plain: list[int]
) -> None:
    """The penalties also count the first token, although the prefill engine drew it."""

    def penalised_from(start: int) -> list[int]:
        processors = LogitsProcessorList([PresenceAndFrequency(presence, frequency, start)])
        return generate(logits_processor=processors, sequence_bias={(plain[0],): 8.0}).token_ids

    wanted = penalised_from(len(PROMPT))
    assert wanted != penalised_from(len(PROMPT) + 1), "the first token matters"
    bias = ((plain[0], 8.0),)
    outcome = run(pair, greedy(presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias))
    assert outcome.token_ids == wanted


def test_shaping_stays_with_its_request_in_a_batch(pair: InProcessPair, generate: Generate, plain: list[int]) -> None:
    penalised = pair.submit("penalised", PROMPT, greedy(repetition_penalty=1.8, max_tokens=12))
    unshaped = pair.submit("plain", PROMPT, greedy())
    pair.run(until=lambda: penalised.has_ended)
    reused = pair.submit("a later request in the same row", PROMPT, greedy(repetition_penalty=1.4))
    pair.run()
    assert penalised.token_ids == generate(repetition_penalty=1.8).token_ids[:12]
    assert unshaped.token_ids == plain
    assert reused.token_ids == generate(repetition_penalty=1.4).token_ids
