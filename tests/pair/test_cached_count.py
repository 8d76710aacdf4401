"""Tests that `num_cached_tokens` counts the KV that other requests had left when a request came, and nothing that the
request computed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import RowFailure
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, PrebuiltBatch, RowFailed
from tests.support.pair import InProcessPair, MakePair, Outcome, PairOptions

PROMPT = [20 + (place * 7) % 40 for place in range(60)]
GREEDY = ResolvedSampling(seed=5, max_tokens=4, temperature=0.0)

Tiny = Callable[[str], TargetModel]


def num_cached(outcome: Outcome) -> int:
    assert outcome.finished is not None
    return outcome.finished.timings.num_cached_tokens


def num_attempts(outcome: Outcome) -> int:
    assert outcome.finished is not None
    return outcome.finished.timings.num_handoff_attempts


def answered(pair: InProcessPair, prompt: Sequence[int]) -> Outcome:
    outcome = pair.submit(f"of {len(pair.outcomes)}", prompt, GREEDY, cache_salt="")
    pair.run()
    return outcome


def without_its_number(frame: Frame) -> Sequence[Frame]:
    return () if isinstance(frame, PrebuiltBatch) else (frame,)


def lost_once(pair: InProcessPair) -> Outcome:
    """Submits the prompt. Prefill computes it, but its call ends before the PrebuiltBatch has come."""
    pair.tamper = without_its_number
    outcome = pair.submit("lost", PROMPT, GREEDY, cache_salt="")
    pair.run(until=lambda: pair.decode.load().num_row_retries > 0)
    pair.tamper = None
    pair.run()
    assert num_attempts(outcome) == 2
    return outcome


def test_a_request_whose_first_attempt_was_lost_does_not_count_what_that_one_left(
    make_pair: MakePair, tiny_target: Tiny
) -> None:
    pair = make_pair(tiny_target("llama"))
    assert num_cached(lost_once(pair)) == 0
    assert num_cached(answered(pair, PROMPT)) == len(PROMPT) - 1, "nothing was left"


def test_but_it_counts_what_decode_held_for_it(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"))
    answered(pair, PROMPT[:20])
    assert num_cached(lost_once(pair)) == 20


def test_a_refused_attempt_left_nothing_so_the_next_one_counts(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_caches=False))
    answered(pair, PROMPT)
    refusal = RowFailed(0, RowFailure.CAPACITY, True, 0, "full")
    pair.tamper = lambda _frame: (refusal,)
    outcome = pair.submit("refused", PROMPT, GREEDY, cache_salt="")
    pair.run(until=lambda: pair.decode.load().num_row_retries > 0)
    pair.tamper = None
    pair.run()
    assert num_attempts(outcome) > 1
    assert num_cached(outcome) == len(PROMPT) - 1


def test_a_request_that_was_retracted_before_its_number_came_does_not_count_what_it_left(
    make_pair: MakePair, tiny_target: Tiny
) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=100, chunk_tokens=8))
    older = pair.submit("older", PROMPT[:20], ResolvedSampling(seed=5, max_tokens=60, temperature=0.0), cache_salt="")
    pair.run(until=lambda: bool(older.token_ids))
    younger = pair.submit("younger", PROMPT[20:], GREEDY, cache_salt="")
    pair.step_decode()
    num_steps = len(pair.prefill_steps)
    while len(pair.prefill_steps) < num_steps + 2:
        pair.step_prefill()
    while not pair.decode.load().num_retractions:
        assert older.finished is None, "nobody gave way"
        pair.step_decode()
    pair.run()
    assert younger.finished is not None and younger.finished.timings.num_retractions == 1
    assert num_cached(younger) == 0


def test_a_resumed_stream_does_not_count_what_the_earlier_call_left(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"))
    broken = pair.submit("broken", PROMPT, GREEDY, cache_salt="")
    pair.run(until=lambda: len(broken.token_ids) >= 2)
    pair.abort("broken")
    pair.settle()
    whole = [*PROMPT, *broken.token_ids]
    resumed = pair.submit("resumed", whole, GREEDY, prompt_len=len(PROMPT), cache_salt="")
    pair.run()
    assert num_cached(resumed) == 0
    assert resumed.finished is not None
    assert pair.decode.load().prefixes.num_found == len(whole) - 1, "it found nothing"
