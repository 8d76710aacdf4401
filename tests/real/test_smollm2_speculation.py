"""Tests of SmolLM2 with Baton's draft head: sampled tokens equal those without drafts.

The forwards are float32 and fused, so that a wider forward of the target cannot change a choice. Greedy tokens are in
test_smollm2_parity.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.sampling.params import ResolvedSampling
from tests.real.conftest import MAX_TOKENS, SIZES, Prompts
from tests.support.drafted import Counts, Drafted, assert_same
from tests.support.fused import fused
from tests.support.pair import InProcessPair, MakePair, PairOptions

NUM_SAMPLED = 8


@pytest.mark.timeout(600)
def test_a_seed_gives_the_same_output_with_and_without_drafts(
    drafted: Drafted, prompts: Prompts, make_pair: MakePair
) -> None:
    short = [ids for name, ids in prompts if not name.startswith("long")]
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
        {"temperature": 1.0, "num_logprobs": 2},
    )

    def run(pair: InProcessPair) -> InProcessPair:
        for number in range(NUM_SAMPLED):
            sampling = ResolvedSampling(seed=number, max_tokens=32, **kinds[number % len(kinds)])
            pair.submit(str(number), short[number % len(short)], sampling)
        pair.run(bound_s=300)
        return pair

    models = drafted.target, drafted.head
    with fused(*models, max_tokens=MAX_TOKENS) as decode, fused(*models, max_tokens=MAX_TOKENS) as prefill:
        plain = run(make_pair(decode[0], PairOptions(**SIZES), prefill_model=prefill[0]))
        trees = PairOptions(draft_topk=3, num_draft_steps=3, num_draft_tokens=9, **SIZES)
        for options in (PairOptions(num_draft_tokens=4, **SIZES), trees):
            pair = run(
                make_pair(decode[0], options, draft=decode[1], prefill_model=prefill[0], prefill_draft=prefill[1])
            )
            for name, expected in plain.outcomes.items():
                assert_same(pair.outcomes[name], expected)
            counts = Counts.of(pair.outcomes.values())
            print(f"{options.spec_info}: {counts.num_accepted} drafts accepted, {counts.num_rejected} not")
            assert counts.num_accepted > 50 and counts.num_rejected > 50
