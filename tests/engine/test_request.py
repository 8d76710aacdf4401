"""A request's record keeps its cache namespace, and reports how many prompt tokens were cached."""

from __future__ import annotations

import pytest

from common.sampling.params import ResolvedSampling
from decode_service.messages import FinishReason, Submit
from decode_service.schedule.request import Request


def request(cache_salt: str | None = None) -> Request:
    sampling = ResolvedSampling(seed=0, max_tokens=8)
    submit = Submit("r", (1, 2, 3), 3, sampling, cache_salt=cache_salt)
    return Request.of(submit, arrival=0, now_s=0.0)


@pytest.mark.parametrize("cache_salt", [None, "", "tenant"])
def test_it_keeps_its_namespace(cache_salt: str | None) -> None:
    assert request(cache_salt).cache_salt == cache_salt


@pytest.mark.parametrize(("counted", "reported"), [(0, 0), (2, 2), (5, 3)])
def test_its_end_counts_cached_tokens_of_the_prompt_alone(counted: int, reported: int) -> None:
    """A request that brought output along may find that cached too. Later attempts find what the first one left."""
    req = request()
    req.found_cached(counted)
    req.found_cached(9)
    assert req.finished(FinishReason.LENGTH, 1).timings.num_cached_tokens == reported
