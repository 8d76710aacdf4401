"""Tests that a request which is retracted while it speculates gives the same output as an undisturbed run without
drafts.
"""

from __future__ import annotations

import pytest

from common.draft.head import DraftHead
from common.sampling.params import ResolvedSampling
from tests.support.drafted import SAMPLED, SHAPES, Counts, Drafted, assert_same
from tests.support.pair import InProcessPair, MakePair, PairOptions

NEW_TOKENS = 48
SAMPLINGS = [
    ResolvedSampling(seed=number, max_tokens=NEW_TOKENS, temperature=(0.0, 1.0)[number % 2], **options)
    for number, options in enumerate(
        SAMPLED["penalties"] | SAMPLED["bias"] | more
        for more in ({}, {"min_tokens": 40, "eos_token_ids": (11, 12)}) * 3
    )
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("shape", ["chain-4", "tree-2x4-9"])
def test_retracted_requests_stream_what_they_would_without_drafts(
    shape: str, overlap: bool, leaning: Drafted, make_pair: MakePair
) -> None:
    def run(draft: DraftHead | None, decode_tokens: int) -> InProcessPair:
        options = PairOptions(decode_tokens=decode_tokens, overlap=overlap, chunk_tokens=16, **SHAPES[shape])
        pair = make_pair(leaning.target, options, draft=draft)
        for number, sampling in enumerate(SAMPLINGS):
            pair.submit(str(number), [4 + (5 * number + place) % 50 for place in range(8 + number)], sampling)
        pair.finish_prefill()
        pair.run()
        return pair

    undisturbed, pair = run(None, 2048), run(leaning.head, 128)
    assert undisturbed.decode.load().num_retractions == 0 < pair.decode.load().num_retractions
    counts = Counts.of(pair.outcomes.values())
    assert counts.num_accepted > 20 and counts.num_rejected > 20, counts
    for name, expected in undisturbed.outcomes.items():
        assert_same(pair.outcomes[name], expected)
