"""/v1/completions, called with the `openai` package, in front of a real prefill and decode service."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from baton import Client
from tests.gateway.callers import Caller

PROMPT = "the other thing"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def direct(pair: Client) -> Any:
    """The answer that the gRPC client gets to the same request."""
    return pair.complete(PROMPT, temperature=0.0, max_tokens=24)


def test_a_completion_has_the_tokens_the_grpc_client_gets(caller: Caller, direct: Any) -> None:
    answer = caller.complete(prompt=PROMPT, **GREEDY, extra_body=IDS)
    (choice,) = answer.choices
    assert choice.token_ids == list(direct.token_ids)
    assert (choice.text, choice.finish_reason, choice.logprobs) == (direct.text, "length", None)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.id.startswith("cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (direct.usage.num_prompt_tokens, 24)


def test_a_stream_has_the_same_tokens_in_chunks(caller: Caller, direct: Any) -> None:
    *chunks, usage = caller.completion_chunks(
        prompt=PROMPT, **GREEDY, stream_options={"include_usage": True}, extra_body=IDS
    )
    *parts, last = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == direct.text
    assert [token_id for part in parts for token_id in part.token_ids] == list(direct.token_ids)
    assert (last.text, last.finish_reason) == ("", "length")
    assert (usage.choices, usage.usage.completion_tokens) == ([], 24)


@pytest.mark.parametrize("prompts", [["the one", "another"], [[10, 11, 12], [13, 14]]], ids=["texts", "ids"])
def test_several_prompts_have_n_choices_each_in_their_order(caller: Caller, pair: Client, prompts: list[Any]) -> None:
    answer = caller.complete(prompt=prompts, n=2, **GREEDY, extra_body=IDS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [
        pair.complete(**({"prompt": each} if isinstance(each, str) else {"token_ids": each}), **GREEDY)
        for each in prompts
    ]
    for index, choice in enumerate(answer.choices):
        assert choice.token_ids == list(expected[index // 2].token_ids)
    assert answer.usage.prompt_tokens == sum(each.usage.num_prompt_tokens for each in expected)
    assert answer.usage.completion_tokens == 4 * 24

    chunks = caller.completion_chunks(prompt=prompts, n=2, **GREEDY, extra_body=IDS)
    streamed: dict[int, list[int]] = {}
    for chunk in chunks:
        streamed.setdefault(chunk.choices[0].index, []).extend(chunk.choices[0].token_ids)
    assert streamed == {index: list(choice.token_ids) for index, choice in enumerate(answer.choices)}


def test_without_a_bound_there_are_as_many_tokens_as_openai_gives(caller: Caller) -> None:
    answer = caller.complete(prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_best_of_several_have_the_largest_mean_log_probability(
    caller: Caller, pair: Client, logprobs: int | None
) -> None:
    prompts, sampled = ["the one", "another"], {"temperature": 1.5, "seed": 3, "max_tokens": 6}
    answer = caller.complete(prompt=prompts, n=2, best_of=4, **sampled, logprobs=logprobs, extra_body=IDS)
    expected, num_tokens = [], 0
    for prompt in prompts:
        each = [pair.complete(prompt, choice_index=index, logprobs=0, **sampled) for index in range(4)]
        num_tokens += sum(len(one.token_ids) for one in each)
        means = [fmean(entry.chosen.logprob for entry in one.logprobs) for one in each]
        expected += [list(each[index].token_ids) for index in sorted(range(4), key=lambda i: -means[i])[:2]]
    assert [choice.token_ids for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == num_tokens, "all of them were generated"
    assert all((choice.logprobs is None) == (logprobs is None) for choice in answer.choices)


def test_choices_differ_and_those_of_a_seed_come_again(caller: Caller, pair: Client) -> None:
    def token_ids(**options: Any) -> list[list[int]]:
        sampled = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0}
        answer = caller.complete(**sampled, **options, extra_body={**IDS, "ignore_eos": True})
        return [choice.token_ids for choice in answer.choices]

    seeded, free = token_ids(seed=7, n=4), token_ids(n=4)
    assert len({tuple(ids) for ids in (*seeded, *free)}) == 8
    direct = pair.complete(PROMPT, seed=7, max_tokens=24, ignore_eos=True).token_ids
    assert token_ids(seed=7) == seeded[:1] == [list(direct)]
