"""Tests that tokens are the same at any draft depth and whichever requests want drafts, and that the counts report what
was drafted.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from common.sampling.params import ResolvedSampling
from decode_service.speculate.depth import FixedDepth
from decode_service.speculate.spec_info import SpecInfo
from tests.support.drafted import SHAPES, Counts, Drafted, assert_same
from tests.support.pair import InProcessPair, MakePair, PairOptions

NUM_REQUESTS = 12
NEW_TOKENS = 40


class ScriptedDepth(FixedDepth):
    """Chooses a random depth for each step. A step leaves a draft seed only if the next step drafts."""

    def __init__(self, deepest: SpecInfo) -> None:
        super().__init__(deepest)
        numbers = random.Random(5)
        self._depths = [numbers.choice((0, 0, *range(deepest.num_steps + 1))) for _ in range(1000)]
        self._deepest = deepest

    def choose(self, *, draft_lag: NDArray[np.int64], num_wanted: int, num_forced: NDArray[np.int64]) -> SpecInfo:
        spec_info = self._deepest.at_depth(self._depths[-1] if num_wanted else 0)
        return spec_info if self._depths[-2] else spec_info.without_seed()

    def launched(self, spec_info: SpecInfo) -> None:
        self._depths.pop()


def run(pair: InProcessPair, *, undrafted: frozenset[int] = frozenset()) -> InProcessPair:
    for number in range(NUM_REQUESTS):
        options = {"repetition_penalty": 1.2, "frequency_penalty": 0.2} if number % 3 == 0 else {}
        sampling = ResolvedSampling(
            seed=number, max_tokens=NEW_TOKENS, temperature=(0.0, 1.0)[number % 2], num_logprobs=1, **options
        )
        tokens = [4 + (5 * number + place) % 50 for place in range(3 + 4 * number)]
        pair.submit(str(number), tokens, sampling, wants_drafts=number not in undrafted)
    pair.run()
    return pair


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize(
    ("head", "shape"), [("leaning", "chain-4"), ("leaning", "tree-4x3-15"), ("leaning_layers", "chain-4")]
)
def test_the_depth_may_change_with_every_step(
    head: str, shape: str, overlap: bool, make_pair: MakePair, request: pytest.FixtureRequest
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    options = PairOptions(overlap=overlap, **SHAPES[shape])
    plain = run(make_pair(drafted.target, options))
    scripted = dataclasses.replace(options, depth=ScriptedDepth(options.spec_info))
    pair = run(make_pair(drafted.target, scripted, draft=drafted.head))
    for name, expected in plain.outcomes.items():
        assert_same(pair.outcomes[name], expected)
    levels = {step.speculation.num_levels for step in pair.decode_steps if step.speculation}
    assert levels == set(range(options.spec_info.num_steps + 1))
    assert Counts.of(pair.outcomes.values()).num_accepted > NUM_REQUESTS


def test_adaptive_depth_changes_nothing_but_speed(leaning: Drafted, make_pair: MakePair) -> None:
    plain = run(make_pair(leaning.target, PairOptions()))
    pair = run(make_pair(leaning.target, PairOptions(adapts_depth=True), draft=leaning.head))
    for name, expected in plain.outcomes.items():
        assert_same(pair.outcomes[name], expected)
    levels = [step.speculation.num_levels for step in pair.decode_steps if step.speculation]
    assert len(levels) == len(pair.decode_steps) and len(set(levels)) > 1, "every step was as deep"


def test_no_draft_counts_for_a_request_that_wants_none(copying: Drafted, make_pair: MakePair) -> None:
    odd = frozenset(range(1, NUM_REQUESTS, 2))
    plain = run(make_pair(copying.target, PairOptions()))
    pair = run(make_pair(copying.target, PairOptions(num_draft_tokens=3), draft=copying.head), undrafted=odd)
    for name, expected in plain.outcomes.items():
        outcome = pair.outcomes[name]
        assert_same(outcome, expected)
        assert outcome.finished is not None
        if int(name) in odd:
            assert outcome.finished.speculation is None
            assert outcome.num_deliveries == NEW_TOKENS, "several tokens came at once"
        else:
            assert outcome.finished.speculation is not None
            assert outcome.num_deliveries < NEW_TOKENS


def test_nothing_is_drafted_when_nobody_wants_it(copying: Drafted, make_pair: MakePair) -> None:
    pair = run(make_pair(copying.target, PairOptions(), draft=copying.head), undrafted=frozenset(range(NUM_REQUESTS)))
    assert {step.speculation.num_levels for step in pair.decode_steps if step.speculation} == {0}


def test_a_request_is_told_what_was_drafted_and_accepted_at_each_position(
    leaning: Drafted, make_pair: MakePair
) -> None:
    pair = run(make_pair(leaning.target, PairOptions(num_draft_tokens=3), draft=leaning.head))
    for outcome in pair.outcomes.values():
        assert outcome.finished is not None
        counts = outcome.finished.speculation
        assert counts is not None
        assert counts.drafted_at == (counts.num_verify_steps,) * 3
        assert sorted(counts.accepted_at, reverse=True) == list(counts.accepted_at), "a draft without those before it"
        assert sum(counts.accepted_at) == counts.num_accepted_tokens
        assert 1 + counts.num_verify_steps + counts.num_accepted_tokens == NEW_TOKENS
        assert min(counts.draft_s, counts.verify_s, counts.extend_s) > 0
    steps = [step.speculation for step in pair.decode_steps if step.speculation]
    accepted = sum(accept_len - 1 for step in steps for accept_len in step.accept_lens)
    assert accepted >= Counts.of(pair.outcomes.values()).num_accepted
    assert all(step.verify_s > 0 and step.draft_s > 0 and step.extend_s > 0 for step in steps)
