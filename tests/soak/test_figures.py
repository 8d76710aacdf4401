"""Tests that the soak's figures distinguish growth from allocators that settle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.soak.figures import Figures, Trend

START = Figures(rss_mib=500.0, num_fds=20, num_threads=15)


def samples(field: str, values: list[float]) -> list[Figures]:
    return [replace(START, **{field: value}) for value in values]


def is_flat(field: str, values: list[float]) -> bool:
    return Trend.of(samples(field, values), requests_a_sample=200).is_flat


@pytest.mark.parametrize("num_waves", [48, 75])
@pytest.mark.parametrize(("leaked_kib", "flat"), [(0.0, True), (0.4, True), (1.0, True), (1.05, False), (2.5, False)])
def test_memory_that_each_request_leaks_is_told_however_large_the_process(
    num_waves: int, leaked_kib: float, flat: bool
) -> None:
    for start_mib in (0.0, 64.0, 4096.0):
        assert is_flat("rss_mib", [start_mib + wave * 200 * leaked_kib / 1024 for wave in range(num_waves)]) is flat


def test_the_growth_a_request_is_that_between_the_medians() -> None:
    trend = Trend.of(samples("rss_mib", [500.0 + wave for wave in range(16)]), requests_a_sample=1024)
    assert (trend.before.rss_mib, trend.after.rss_mib, trend.num_requests) == (505.5, 513.5, 8 * 1024)
    assert trend.growth_kib == 1.0


@pytest.mark.parametrize("field", ["num_fds", "num_threads"])
def test_what_rises_to_the_end_has_grown(field: str) -> None:
    start = getattr(START, field)
    assert not is_flat(field, [start + wave for wave in range(16)])


@pytest.mark.parametrize(("field", "step"), [("rss_mib", 50.0), ("num_fds", 4), ("num_threads", 4)])
def test_what_settles_in_the_first_quarter_or_comes_and_goes_is_flat(field: str, step: float) -> None:
    start = getattr(START, field)
    assert is_flat(field, [start + step * min(wave, 3) for wave in range(16)])
    assert is_flat(field, [start + step * (wave % 4 == 0) for wave in range(16)])
