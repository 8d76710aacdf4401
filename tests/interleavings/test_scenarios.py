"""Tests that in random orders of the larger scenarios the tokens are right, and no two accesses to a buffer race.

`python -m tests.interleavings.report` prints the number of orders.
"""

from __future__ import annotations

import pytest

from tests.interleavings.catalogue import LARGE, NUM_ORDERS, SOME_ORDER_HAS, AnyScenario, each
from tests.interleavings.explorer import sample, shorten


@pytest.mark.parametrize("scenario", each(LARGE))
def test_random_orders(scenario: AnyScenario) -> None:
    report = sample(scenario.program, num_runs=NUM_ORDERS, seed=1)
    assert report.failure is None, str(shorten(scenario.program, report.failure))
    assert report.num_interleavings >= NUM_ORDERS // 4, "hardly any of the orders differ"
    assert report.witnessed >= SOME_ORDER_HAS.get(scenario, frozenset())
