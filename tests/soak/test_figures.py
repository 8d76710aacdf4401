"""Growth is told from settling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.soak.figures import Figures, Trend

START = Figures(rss_mib=500.0, num_fds=20, num_threads=15)


def samples(field: str, values: list[float]) -> list[Figures]:
    return [replace(START, **{field: value}) for value in values]


@pytest.mark.parametrize(("field", "step"), [("rss_mib", 5.0), ("num_fds", 1), ("num_threads", 1)])
def test_what_rises_to_the_end_has_grown(field: str, step: float) -> None:
    start = getattr(START, field)
    assert not Trend.of(samples(field, [start + step * wave for wave in range(16)])).is_flat


@pytest.mark.parametrize(("field", "step"), [("rss_mib", 50.0), ("num_fds", 4), ("num_threads", 4)])
def test_what_settles_in_the_first_quarter_or_comes_and_goes_is_flat(field: str, step: float) -> None:
    start = getattr(START, field)
    assert Trend.of(samples(field, [start + step * min(wave, 3) for wave in range(16)])).is_flat
    assert Trend.of(samples(field, [start + step * (wave % 4 == 0) for wave in range(16)])).is_flat
