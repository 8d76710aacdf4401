"""Tests that in every order of these scenarios the tokens are right, and no two accesses to a buffer race, and that
some order shows what SOME_ORDER_HAS demands.
"""

from __future__ import annotations

import pytest

from tests.interleavings.catalogue import EXHAUSTIVE, SOME_ORDER_HAS, AnyScenario, each
from tests.interleavings.explorer import explore, shorten


@pytest.mark.parametrize("scenario", each(EXHAUSTIVE))
def test_every_order(scenario: AnyScenario) -> None:
    report = explore(scenario.program)
    assert report.failure is None, str(shorten(scenario.program, report.failure))
    assert (report.num_interleavings, report.is_exhaustive) == (EXHAUSTIVE[scenario], True)
    assert report.witnessed >= SOME_ORDER_HAS.get(scenario, frozenset())
