"""Tests that constrained output is judged by the ratio of its speed to that of unconstrained output in the same
round.
"""

from __future__ import annotations

import pytest

from benchmarks.structured_output import table_of


@pytest.mark.parametrize(
    ("rounds", "ratio", "is_met"),
    [
        ([[100.0, 90.0]], "0.90", True),
        ([[100.0, 89.0]], "0.89", False),
        ([[100.0, 95.0], [200.0, 100.0], [50.0, 50.0]], "0.95", True),
    ],
)
def test_every_concurrency_has_its_bound(rounds: list[list[float]], ratio: str, is_met: bool) -> None:
    lines, found = table_of({1: [[10.0, 10.0]], 8: rounds})
    assert found == is_met
    assert f"| {ratio} | 0.9: {'met' if is_met else 'MISSED'} |" in lines[-1]
    assert lines[-2].endswith("| 1.00 | 0.9: met |")
