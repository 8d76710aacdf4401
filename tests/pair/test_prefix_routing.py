"""Tests of two prefill replicas and one decode service: each turn of a conversation goes to the replica that has the
earlier turns.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.support.drafted import Drafted
from tests.support.pair import InProcessPair, MakePair, PairOptions

NUM_TURNS = 4
SAMPLING = ResolvedSampling(seed=1, max_tokens=5)


def cached_by_turn(pair: InProcessPair, num_talks: int) -> list[list[tuple[int, int]]]:
    """Holds conversations. The same turn of all of them runs at once, each time in another order.

    Returns for each turn of each conversation how many of its tokens the replica had cached, and how many tokens the
    conversation's earlier turns had.
    """
    said = {number: [2 + number, *range(10, 60)] for number in range(num_talks)}
    figures: list[list[tuple[int, int]]] = []
    for turn in range(NUM_TURNS):
        order = [*said][turn % num_talks :] + [*said][: turn % num_talks]
        before = {number: len(said[number]) for number in order}
        for number in order:
            said[number] += [3 + turn, *range(60, 70)]
            pair.submit(f"{number}-{turn}", said[number], SAMPLING, cache_salt="")
        pair.run()
        of_turn = []
        for number in order:
            outcome = pair.outcomes[f"{number}-{turn}"]
            assert outcome.finished is not None, outcome.error
            of_turn.append((outcome.finished.timings.num_cached_tokens, before[number] if turn else 0))
            said[number] += outcome.token_ids
        figures.append(of_turn)
    pair.settle()
    return figures


@pytest.mark.parametrize("num_talks", [2, 3])
def test_turns_go_where_their_conversation_is(
    num_talks: int, make_pair: MakePair, tiny_target: Callable[[str], TargetModel]
) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(num_replicas=2))
    for of_turn in cached_by_turn(pair, num_talks)[1:]:
        assert all(num_cached >= num_before - SAMPLING.max_tokens for num_cached, num_before in of_turn)
    counts = [replica.engine.load().prefixes for replica in pair.replicas]
    assert all(count.num_tokens for count in counts), "one replica had no work"
    assert sum(count.num_found for count in counts) == pair.decode.load().num_expected_cached


def test_drafts_change_nothing_about_it(make_pair: MakePair, guessing_layers: Drafted) -> None:
    pair = make_pair(guessing_layers.target, PairOptions(num_replicas=2), draft=guessing_layers.head)
    cached_by_turn(pair, 2)
    counts = [replica.engine.load().prefixes for replica in pair.replicas]
    assert sum(count.num_found for count in counts) == pair.decode.load().num_expected_cached > 0


def test_without_routing_by_prefix_turns_are_computed_anew(
    make_pair: MakePair, tiny_target: Callable[[str], TargetModel]
) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(num_replicas=2, prefix_routing=False))
    second_turn = cached_by_turn(pair, 2)[1]
    assert [num_cached for num_cached, _ in second_turn] == [0, 0]
    assert pair.decode.load().num_expected_cached == 0
