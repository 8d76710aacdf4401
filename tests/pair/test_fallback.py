"""Tests that a decode service without a ready replica computes prompts of any length itself, and that nothing a caller
can see differs: tokens, log-probabilities, drafts, and the output that a resumed request brings along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from decode_service.messages import Drain, Phase
from tests.support.drafted import Drafted
from tests.support.pair import InProcessPair, MakePair, Outcome, PairOptions

ALONE = PairOptions(prefill_fallback=True)
NEW_TOKENS = 12
PROMPTS = [[20 + (number * 37 + place * (number + 3)) % 40 for place in range(length)] for number, length in
           enumerate((300, 5, 280, 40, 17))]  # fmt: skip
SAMPLINGS = [
    ResolvedSampling(seed=1, max_tokens=NEW_TOKENS, temperature=0.0, num_logprobs=3),
    ResolvedSampling(seed=2, max_tokens=NEW_TOKENS, temperature=0.9, top_p=0.9),
    ResolvedSampling(seed=3, max_tokens=NEW_TOKENS, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
    ResolvedSampling(seed=4, max_tokens=NEW_TOKENS, temperature=1.0, num_logprobs=1),
    ResolvedSampling(seed=5, max_tokens=NEW_TOKENS, temperature=0.0),
]

Tiny = Callable[[str], TargetModel]


def answers(pair: InProcessPair, brought: dict[int, list[int]] | None = None) -> list[Outcome]:
    """Sends all requests at once, and returns their outcomes. `brought` is the output that requests bring along, by
    number.
    """
    for number, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        token_ids = [*prompt, *(brought or {}).get(number, [])]
        pair.submit(str(number), token_ids, sampling, prompt_len=len(prompt), is_traced=True)
    pair.run()
    return list(pair.outcomes.values())


def without_replica(pair: InProcessPair) -> InProcessPair:
    pair.replicas[0].lose()
    pair.step_decode()
    return pair


def assert_equal(alone: list[Outcome], together: list[Outcome]) -> None:
    for number, (mine, theirs) in enumerate(zip(alone, together, strict=True)):
        assert mine.token_ids == theirs.token_ids, f"request {number}: {mine.error}"
        assert [entry.top_ids for entry in mine.logprobs] == [entry.top_ids for entry in theirs.logprobs]
        assert mine.finished is not None and mine.finished.timings.num_handoff_attempts == 0
        assert Phase.LOCAL_PREFILL in [began.phase for began in mine.phases]


@pytest.mark.parametrize("keeps_short", [False, True])
def test_a_chat_is_computed_once_whatever_the_length_of_its_turns(
    keeps_short: bool, make_pair: MakePair, tiny_target: Tiny
) -> None:
    """A chat has eight short turns and a long one. Wherever they are computed, no service computes a token twice."""
    pair = make_pair(tiny_target("llama"), PairOptions(local_prefill_tokens=16 if keeps_short else 0))
    chat: list[int] = []
    for turn, num_new in enumerate((*[10] * 8, 24)):
        chat += [2 + (turn * 17 + place * (turn + 5)) % 55 for place in range(num_new)]
        outcome = pair.submit(str(turn), chat, replace(SAMPLINGS[0], max_tokens=5), cache_salt="")
        pair.run()
        assert outcome.finished is not None
        assert outcome.finished.timings.num_handoff_attempts == (0 if keeps_short else 1)
        chat += outcome.token_ids
    num_prefilled = sum(step.num_tokens for step in pair.prefill_steps)
    assert num_prefilled == (0 if keeps_short else len(chat) - len(outcome.token_ids))


@pytest.mark.parametrize("local_prefill_tokens", [0, 16])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_answers_are_those_of_the_pair(
    overlap: bool, local_prefill_tokens: int, make_pair: MakePair, tiny_target: Tiny
) -> None:
    options = replace(ALONE, overlap=overlap, local_prefill_tokens=local_prefill_tokens)
    together = answers(make_pair(tiny_target("llama")))
    assert_equal(answers(without_replica(make_pair(tiny_target("llama"), options))), together)


@pytest.mark.parametrize("head", ["leaning", "leaning_layers"])
def test_drafts_are_those_of_the_pair(head: str, make_pair: MakePair, request: pytest.FixtureRequest) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    together = answers(make_pair(drafted.target, draft=drafted.head))
    alone = answers(without_replica(make_pair(drafted.target, ALONE, draft=drafted.head)))
    assert_equal(alone, together)

    def accepted(outcomes: list[Outcome]) -> list[tuple[int, ...]]:
        return [
            each.finished.speculation.accepted_at for each in outcomes if each.finished and each.finished.speculation
        ]

    assert accepted(alone) == accepted(together) and sum(map(sum, accepted(alone))) > len(PROMPTS)


def test_a_resumed_request_continues_exactly(make_pair: MakePair, tiny_target: Tiny) -> None:
    whole = answers(make_pair(tiny_target("llama")))
    brought = {number: outcome.token_ids[: 3 + number] for number, outcome in enumerate(whole)}
    rest = answers(without_replica(make_pair(tiny_target("llama"), ALONE)), brought)
    for number, outcome in enumerate(rest):
        assert brought[number] + outcome.token_ids == whole[number].token_ids
        assert outcome.finished is not None
        assert outcome.finished.num_completion_tokens == NEW_TOKENS


def test_requests_of_a_dying_replica_go_on_here(make_pair: MakePair, tiny_target: Tiny) -> None:
    together = answers(make_pair(tiny_target("llama")))
    pair = make_pair(tiny_target("llama"), replace(ALONE, chunk_tokens=16, max_batch_tokens=32))
    for number, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        pair.submit(str(number), prompt, sampling)
    pair.run(until=lambda: pair.decode.load().num_running > 0)
    pair.replicas[0].lose()
    pair.run()
    assert [outcome.token_ids for outcome in pair.outcomes.values()] == [each.token_ids for each in together]
    assert pair.decode.load().num_row_retries > 0


def test_what_was_admitted_is_finished_while_it_drains(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = without_replica(make_pair(tiny_target("llama"), ALONE))
    outcomes = [pair.submit(str(number), prompt, SAMPLINGS[4]) for number, prompt in enumerate(PROMPTS)]
    pair.step()
    pair.post(Drain())
    pair.abort("2")
    pair.run()
    assert [outcome.finished is not None for outcome in outcomes] == [True, True, False, True, True]


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_without_it_requests_fail(is_on: bool, make_pair: MakePair, tiny_target: Tiny) -> None:
    now_s = [1000.0]
    pair = without_replica(
        make_pair(tiny_target("llama"), replace(ALONE, prefill_fallback=is_on), clock=lambda: now_s[0])
    )
    outcome = pair.submit("a", PROMPTS[0], SAMPLINGS[4])
    pair.step()
    now_s[0] += 100
    pair.run()
    assert (outcome.finished is not None, outcome.error is not None) == (is_on, not is_on)
