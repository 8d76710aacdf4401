"""Tests of admission, and of the request that gives up its KV slots when these run out. That its stream does not show
it is in test_same_output.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.errors import InvalidRequest
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.support.pair import InProcessPair, MakePair, PairOptions

NUM_REQUESTS = 8
NEW_TOKENS = 48
POOL_TOKENS = 128
GREEDY = ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0)

Tiny = Callable[[str], TargetModel]


def prompt_of(number: int) -> list[int]:
    return [20 + 7 * number + place for place in range(10 + number)]


def submit_all(pair: InProcessPair) -> None:
    for number in range(NUM_REQUESTS):
        pair.submit(str(number), prompt_of(number), GREEDY)


def num_retractions(pair: InProcessPair, name: str) -> int:
    finished = pair.outcomes[name].finished
    assert finished is not None, pair.outcomes[name].error
    return finished.timings.num_retractions


def test_a_younger_request_still_transferring_gives_way_to_an_older_one(make_pair: MakePair, tiny_target: Tiny) -> None:
    """A handoff under way gives up its slots before a request that already runs does."""
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=POOL_TOKENS))
    oldest = pair.submit("oldest", prompt_of(0), replace(GREEDY, max_tokens=100))
    pair.run(until=lambda: len(oldest.token_ids) >= 2)
    younger = pair.submit("younger", list(range(30, 90)), GREEDY)
    while not oldest.has_ended:
        pair.step_decode()  # the prefill service stands still
    assert num_retractions(pair, "oldest") == 0
    assert pair.decode.load().num_retractions > 0
    pair.run()
    assert len(younger.token_ids) == NEW_TOKENS


# ---- admission ------------------------------------------------------------------------------------------------------


def test_admission_counts_reserved_transferring_and_running_rows(make_pair: MakePair, tiny_target: Tiny) -> None:
    """Admission leaves each of these rows room to grow. A burst is not admitted merely because the running rows need
    few slots.
    """
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=POOL_TOKENS))
    submit_all(pair)
    pair.step_decode()
    load = pair.decode.load()
    assert (load.rows.reserved, load.rows.transferring, load.rows.running) == (4, 0, 0)
    assert load.num_queued == NUM_REQUESTS - 4, "their prompts alone would all fit"
    pair.run()


def test_no_more_rows_are_reserved_transferring_and_running_than_the_limit(
    make_pair: MakePair, tiny_target: Tiny
) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_rows=3))
    submit_all(pair)
    most = 0
    while not all(outcome.has_ended for outcome in pair.outcomes.values()):
        pair.step()
        rows = pair.decode.load().rows
        most = max(most, rows.reserved + rows.transferring + rows.running)
    assert most == 3


def test_a_request_larger_than_the_pool_is_refused_naming_max_tokens(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=64))
    too_large = pair.submit("too large", [9] * 20, replace(GREEDY, max_tokens=45))
    fitting = pair.submit("fitting", [9] * 20, replace(GREEDY, max_tokens=44))
    pair.run()
    assert isinstance(too_large.error, InvalidRequest)
    assert (too_large.error.field, too_large.token_ids) == ("max_tokens", [])
    assert "65" in str(too_large.error) and "64" in str(too_large.error)
    assert len(fitting.token_ids) == 44


def test_one_request_may_fill_the_whole_pool_among_others(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=64))
    for number in range(4):
        pair.submit(str(number), [9 + number] * 20, replace(GREEDY, max_tokens=44))
    pair.run()
    assert all(len(outcome.token_ids) == 44 for outcome in pair.outcomes.values())
