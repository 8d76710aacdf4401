"""Whatever the order, the tokens are the oracle's and no two accesses to a buffer race.

`python -m tests.interleavings.report` prints the numbers of orders.
"""

from __future__ import annotations

import pytest

from tests.interleavings.catalogue import EXHAUSTIVE, LARGE, NUM_ORDERS
from tests.interleavings.explorer import explore, sample, shorten
from tests.interleavings.scenarios import Scenario


def name_of(scenario: Scenario) -> str:
    return scenario.name


@pytest.mark.parametrize("scenario", EXHAUSTIVE, ids=name_of)
def test_every_order(scenario: Scenario) -> None:
    report = explore(scenario.program)
    assert report.failure is None, str(shorten(scenario.program, report.failure))
    assert (report.num_interleavings, report.is_exhaustive) == (EXHAUSTIVE[scenario], True)


@pytest.mark.parametrize("scenario", LARGE, ids=name_of)
def test_random_orders(scenario: Scenario) -> None:
    report = sample(scenario.program, num_runs=NUM_ORDERS, seed=1)
    assert report.failure is None, str(shorten(scenario.program, report.failure))
    assert report.num_interleavings >= NUM_ORDERS // 4, "hardly any of the orders differ"
