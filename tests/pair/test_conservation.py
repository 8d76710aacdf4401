"""Tests that the check at the end of every test of a pair fails if either side lost a row with its slots (field rule
A6, invariant I9).
"""

from __future__ import annotations

import pytest

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.support.pair import pairs_that_keep_all


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_row_that_nobody_releases_fails_the_test_that_ran_the_pair(side: str, last_token_target: TargetModel) -> None:
    with pytest.raises(AssertionError, match="not over"), pairs_that_keep_all(bound_s=0.2) as make:
        pair = make(last_token_target)
        outcome = pair.submit("request", [5, 6, 7], ResolvedSampling(seed=1, max_tokens=4))
        pair.run()
        assert outcome.finished is not None, "the client notices nothing"
        engine = pair.decode if side == "decode" else pair.prefill
        assert engine.pool.reserve(3) is not None
