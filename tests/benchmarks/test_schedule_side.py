"""The schedule side of a step meets its bounds on its time at the largest batch and on its growth with the batch."""

from __future__ import annotations

import pytest

from benchmarks.machine import CoreSpeed
from benchmarks.schedule_side import Cost, judged


def cost(batch_size: int, total_us: float) -> Cost:
    return Cost(batch_size, batch_size, total_us, total_us, total_us, {}, 0.0, CoreSpeed())


@pytest.mark.parametrize(
    ("totals_us", "is_met"),
    [
        ({1: 300.0, 256: 900.0}, True),
        ({1: 300.0, 256: 1100.0}, False),
        ({1: 2.0, 256: 600.0}, False),  # more than linear
    ],
)
def test_both_bounds_are_judged(totals_us: dict[int, float], is_met: bool) -> None:
    verdict, found = judged([cost(size, total_us) for size, total_us in totals_us.items()])
    assert found == is_met
    assert verdict.endswith("met." if is_met else "MISSED.")


def test_one_size_alone_is_judged_by_its_time() -> None:
    assert judged([cost(256, 900.0)]) == ("0.90 ms at 256 rows, at most 1 ms: met.", True)
    assert judged([cost(256, 1100.0)])[1] is False
