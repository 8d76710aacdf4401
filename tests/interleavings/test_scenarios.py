"""Whatever the order, the tokens are the oracle's and nothing races. `python -m tests.interleavings.report` counts."""

from __future__ import annotations

import pytest

from tests.interleavings.catalogue import EXHAUSTIVE, LARGE, NUM_ORDERS
from tests.interleavings.explorer import explore, sample, shorten
from tests.interleavings.scenarios import Scenario

LEAST_ORDERS = 5


def name_of(scenario: Scenario) -> str:
    return scenario.name


@pytest.mark.parametrize("scenario", EXHAUSTIVE, ids=name_of)
def test_every_order(scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    report = explore(scenario.program)
    assert report.failure is None, str(shorten(scenario.program, report.failure))
    assert report.is_exhaustive
    assert report.num_interleavings >= LEAST_ORDERS, "the scenario leaves the streams no choice"
    with capsys.disabled():
        print(f" [{report.num_interleavings}]", end="")


@pytest.mark.parametrize("scenario", LARGE, ids=name_of)
def test_random_orders(scenario: Scenario) -> None:
    report = sample(scenario.program, num_runs=NUM_ORDERS, seed=1)
    assert report.failure is None, str(shorten(scenario.program, report.failure))
    assert report.num_interleavings >= NUM_ORDERS // 4, "hardly any of the orders differ"
