"""Tests that in random orders of the larger scenarios the tokens are right, and no two accesses to a buffer race.

`python -m tests.interleavings.report` prints the number of orders.
"""

from __future__ import annotations

import pytest

from tests.interleavings.catalogue import LARGE, NUM_ORDERS, NUM_SAMPLED, SHOWN_RARELY, SOME_ORDER_HAS, AnyScenario
from tests.interleavings.explorer import sample, shorten


def name_of(scenario: AnyScenario) -> str:
    return scenario.name


@pytest.mark.parametrize("scenario", LARGE, ids=name_of)
def test_random_orders(scenario: AnyScenario) -> None:
    num_runs = NUM_ORDERS if scenario in SHOWN_RARELY else NUM_SAMPLED
    report = sample(scenario.program, num_runs=num_runs, seed=1)
    assert report.failure is None, str(shorten(scenario.program, report.failure))
    assert report.num_interleavings >= num_runs // 4, "hardly any of the orders differ"
    assert report.witnessed >= SOME_ORDER_HAS.get(scenario, frozenset())
