"""Tests that only requests that want drafts have them, that drafts give way to requests, and that the counts report
what was drafted.
"""

from __future__ import annotations

from common.sampling.params import ResolvedSampling
from tests.support.drafted import Counts, Drafted, assert_same
from tests.support.pair import InProcessPair, MakePair, PairOptions

NUM_REQUESTS = 12
NEW_TOKENS = 40


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


def test_drafts_are_given_up_before_a_request_is(copying: Drafted, make_pair: MakePair) -> None:
    """Two requests fill the pool together, and near their ends no slot is left for drafts."""
    pair = make_pair(copying.target, PairOptions(decode_tokens=112, num_draft_tokens=5), draft=copying.head)
    for number in range(2):
        sampling = ResolvedSampling(seed=number, max_tokens=NEW_TOKENS, temperature=(0.0, 1.0)[number])
        pair.submit(str(number), [4 + (5 * number + place) % 50 for place in range(16)], sampling)
    pair.finish_prefill()
    pair.run()
    assert all(outcome.finished is not None for outcome in pair.outcomes.values())
    assert pair.decode.load().num_retractions == 0
    levels = {step.speculation.num_levels for step in pair.decode_steps if step.speculation}
    assert levels == {0, 5}, "slots were never short"
