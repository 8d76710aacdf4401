"""Each rule taken out of the engine shows in some order of some scenario, which can be run again."""

from __future__ import annotations

import pytest

from tests.engine.mutants.kinds import Mutant
from tests.interleavings.catalogue import CAUGHT_BY, NUM_ORDERS
from tests.interleavings.explorer import replay, sample, shorten
from tests.interleavings.scenarios import Scenario


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [pytest.param(mutant, scenario, id=f"{mutant.__name__}-{scenario.name}") for mutant, scenario in CAUGHT_BY],
)
def test_an_order_that_shows_it_is_found(mutant: Mutant, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        mutant(patch)
        failure = sample(scenario.program, num_runs=NUM_ORDERS, seed=0).failure
        assert failure is not None, "no order showed it"
        script = shorten(scenario.program, failure).script
        assert replay(scenario.program, script) is not None
    assert replay(scenario.program, script) is None, "the engine as it is fails in this order too"
