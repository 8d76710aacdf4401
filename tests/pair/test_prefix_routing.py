"""Tests of two prefill replicas and one decode service: each turn of a conversation goes to the replica that has the
earlier turns.
"""

from __future__ import annotations

import pytest

from common.sampling.params import ResolvedSampling
from tests.support.drafted import Drafted
from tests.support.pair import MakePair, PairOptions

NUM_TURNS = 3
SAMPLING = ResolvedSampling(seed=1, max_tokens=5)


@pytest.mark.parametrize(("has_head", "num_talks"), [(False, 3), (True, 2)])
def test_turns_go_where_their_conversation_is(
    has_head: bool, num_talks: int, make_pair: MakePair, guessing_layers: Drafted
) -> None:
    """The same turn of all conversations runs at once, each time in another order."""
    head = guessing_layers.head if has_head else None
    pair = make_pair(guessing_layers.target, PairOptions(num_replicas=2), draft=head)
    said = {number: [2 + number, *range(10, 60)] for number in range(num_talks)}
    num_ahead = guessing_layers.head.layer_group.num_layers if has_head else 0
    for turn in range(NUM_TURNS):
        num_before = {number: len(tokens) for number, tokens in said.items()}
        outcomes = {}
        for number in [*said][turn % num_talks :] + [*said][: turn % num_talks]:
            said[number] += [3 + turn, *range(60, 70)]
            outcomes[number] = pair.submit(f"{number}-{turn}", said[number], SAMPLING, cache_salt="")
        pair.run()
        for number, outcome in outcomes.items():
            assert outcome.finished is not None, outcome.error
            num_cached = outcome.finished.timings.num_cached_tokens
            assert not turn or num_cached >= num_before[number] - SAMPLING.max_tokens - num_ahead
            said[number] += outcome.token_ids
    pair.settle()
    counts = [replica.engine.load().prefixes for replica in pair.replicas]
    assert all(count.num_tokens for count in counts), "one replica had no work"
    assert sum(count.num_found for count in counts) == pair.decode.load().num_expected_cached > 0
