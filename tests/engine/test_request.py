"""A request's record keeps its cache namespace."""

from __future__ import annotations

import pytest

from common.sampling.params import ResolvedSampling
from decode_service.messages import Submit
from decode_service.schedule.request import Request


def request(cache_salt: str | None = None) -> Request:
    sampling = ResolvedSampling(seed=0, max_tokens=8)
    submit = Submit("r", (1, 2, 3), 3, sampling, cache_salt=cache_salt)
    return Request.of(submit, arrival=0, now_s=0.0)


@pytest.mark.parametrize("cache_salt", [None, "", "tenant"])
def test_it_keeps_its_namespace(cache_salt: str | None) -> None:
    assert request(cache_salt).cache_salt == cache_salt
