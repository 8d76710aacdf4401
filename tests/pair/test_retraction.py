"""Tests that when KV slots run out, the youngest request gives up its own and returns later, and that its stream does
not show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import InvalidRequest
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.support.drafted import assert_same
from tests.support.pair import InProcessPair, MakePair, PairOptions

NUM_REQUESTS = 8
NEW_TOKENS = 48
POOL_TOKENS = 128
SAMPLINGS = {
    "greedy": ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0),
    "sampled": ResolvedSampling(seed=70, max_tokens=NEW_TOKENS, temperature=1.2, top_p=0.95, num_logprobs=1),
    "penalised": ResolvedSampling(
        seed=0,
        max_tokens=NEW_TOKENS,
        temperature=0.0,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias=((9, 8.0),),
        num_logprobs=2,
    ),
    "minimum length": ResolvedSampling(
        seed=0,
        max_tokens=NEW_TOKENS,
        temperature=0.0,
        min_tokens=NEW_TOKENS - 2,
        stop_token_ids=tuple(range(4, 68)),
    ),
}

Tiny = Callable[[str], TargetModel]


def prompt_of(number: int) -> list[int]:
    return [20 + 7 * number + place for place in range(10 + number)]


def submit_all(pair: InProcessPair, sampling: ResolvedSampling) -> None:
    for number in range(NUM_REQUESTS):
        pair.submit(str(number), prompt_of(number), replace(sampling, seed=sampling.seed + number))


def num_retractions(pair: InProcessPair, name: str) -> int:
    finished = pair.outcomes[name].finished
    assert finished is not None, pair.outcomes[name].error
    return finished.timings.num_retractions


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_retracted_requests_stream_the_tokens_of_an_undisturbed_run(
    name: str, overlap: bool, make_pair: MakePair, tiny_target: Tiny
) -> None:
    undisturbed = make_pair(tiny_target("llama"))
    submit_all(undisturbed, SAMPLINGS[name])
    undisturbed.run()
    assert undisturbed.decode.load().num_retractions == 0

    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=POOL_TOKENS, overlap=overlap, chunk_tokens=16))
    submit_all(pair, SAMPLINGS[name])
    pair.finish_prefill()
    pair.run()
    assert pair.decode.load().num_retractions > 0
    assert pair.decode.load().num_retractions == sum(num_retractions(pair, other) for other in pair.outcomes)
    for other, outcome in pair.outcomes.items():
        assert_same(outcome, undisturbed.outcomes[other])
        assert outcome.finished is not None
        assert outcome.finished.num_completion_tokens == len(outcome.token_ids)
        assert outcome.finished.num_prompt_tokens == len(prompt_of(int(other)))
        timings = outcome.finished.timings
        assert timings.num_handoff_attempts == timings.num_retractions + 1


def test_the_oldest_request_is_never_retracted(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=POOL_TOKENS))
    oldest = pair.submit("oldest", prompt_of(0), replace(SAMPLINGS["greedy"], max_tokens=100))
    for number in range(30):
        pair.submit(f"younger {number}", prompt_of(number % 8), SAMPLINGS["greedy"])
    pair.finish_prefill()
    pair.run(until=lambda: oldest.has_ended)
    assert len(oldest.token_ids) == 100
    assert num_retractions(pair, "oldest") == 0
    assert pair.decode.load().num_retractions > 0, "others gave way"
    pair.run()


def test_a_younger_request_still_transferring_gives_way_to_an_older_one(make_pair: MakePair, tiny_target: Tiny) -> None:
    """A handoff under way gives up its slots before a request that already runs does."""
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=POOL_TOKENS))
    oldest = pair.submit("oldest", prompt_of(0), replace(SAMPLINGS["greedy"], max_tokens=100))
    pair.run(until=lambda: len(oldest.token_ids) >= 2)
    younger = pair.submit("younger", list(range(30, 90)), SAMPLINGS["greedy"])
    while not oldest.has_ended:
        pair.step_decode()  # the prefill service stands still
    assert num_retractions(pair, "oldest") == 0
    assert pair.decode.load().num_retractions > 0
    pair.run()
    assert len(younger.token_ids) == NEW_TOKENS


def test_a_retracted_request_returns_before_younger_ones(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=POOL_TOKENS))
    submit_all(pair, SAMPLINGS["greedy"])
    finished: list[str] = []
    while len(finished) < NUM_REQUESTS:
        pair.step()
        finished += [name for name, outcome in pair.outcomes.items() if outcome.has_ended and name not in finished]
    assert pair.decode.load().num_retractions > 0
    assert finished == sorted(finished, key=int)


# ---- admission ------------------------------------------------------------------------------------------------------


def test_admission_counts_reserved_transferring_and_running_rows(make_pair: MakePair, tiny_target: Tiny) -> None:
    """Admission leaves each of these rows room to grow. A burst is not admitted merely because the running rows need
    few slots.
    """
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=POOL_TOKENS))
    submit_all(pair, SAMPLINGS["greedy"])
    pair.step_decode()
    load = pair.decode.load()
    assert (load.rows.reserved, load.rows.transferring, load.rows.running) == (4, 0, 0)
    assert load.num_queued == NUM_REQUESTS - 4, "their prompts alone would all fit"
    pair.run()


def test_no_more_rows_are_reserved_transferring_and_running_than_the_limit(
    make_pair: MakePair, tiny_target: Tiny
) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_rows=3))
    submit_all(pair, SAMPLINGS["greedy"])
    most = 0
    while not all(outcome.has_ended for outcome in pair.outcomes.values()):
        pair.step()
        rows = pair.decode.load().rows
        most = max(most, rows.reserved + rows.transferring + rows.running)
    assert most == 3


def test_a_request_larger_than_the_pool_is_refused_naming_max_tokens(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=64))
    too_large = pair.submit("too large", [9] * 20, replace(SAMPLINGS["greedy"], max_tokens=45))
    fitting = pair.submit("fitting", [9] * 20, replace(SAMPLINGS["greedy"], max_tokens=44))
    pair.run()
    assert isinstance(too_large.error, InvalidRequest)
    assert (too_large.error.field, too_large.token_ids) == ("max_tokens", [])
    assert "65" in str(too_large.error) and "64" in str(too_large.error)
    assert len(fitting.token_ids) == 44


def test_one_request_may_fill_the_whole_pool_among_others(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=64))
    for number in range(4):
        pair.submit(str(number), [9 + number] * 20, replace(SAMPLINGS["greedy"], max_tokens=44))
    pair.run()
    assert all(len(outcome.token_ids) == 44 for outcome in pair.outcomes.values())
