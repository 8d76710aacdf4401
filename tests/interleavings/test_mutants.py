"""Tests that each mutant of the catalogue fails in some order of its scenario, and that this order can be replayed."""

from __future__ import annotations

import re

import pytest

from tests.engine.mutants import rows
from tests.engine.mutants.kinds import Mutant
from tests.interleavings.catalogue import (
    CAUGHT_BY,
    NO_ORDER_HAS,
    NUM_ORDERS,
    SOME_ORDER_HAS,
    AnyScenario,
    marks_of,
)
from tests.interleavings.explorer import explore, replay, sample
from tests.interleavings.killings import id_of, killings, mutant_names


@pytest.mark.parametrize(
    ("mutant", "scenario", "symptom"),
    [pytest.param(*entry, id=id_of(*entry), marks=marks_of(entry[1])) for entry in CAUGHT_BY],
)
def test_an_order_that_shows_it_is_found(
    mutant: Mutant, scenario: AnyScenario, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mutant(patch)
        failure = sample(scenario.program, num_runs=NUM_ORDERS, seed=0).failure
        assert failure is not None, "no order showed it"
        assert re.search(symptom, str(failure.error))
        assert re.search(symptom, str(replay(scenario.program, failure.script)))
    assert replay(scenario.program, failure.script) is None, "the engine as it is fails in this order too"


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [pytest.param(*entry, id=id_of(*entry), marks=marks_of(entry[1])) for entry in NO_ORDER_HAS],
)
def test_what_some_order_has_no_order_has_with_it(
    mutant: Mutant, scenario: AnyScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    report = sample(scenario.program, num_runs=NUM_ORDERS, seed=0)
    assert report.failure is None, "it is right in every order, only late"
    assert report.witnessed.isdisjoint(SOME_ORDER_HAS[scenario])


def test_every_mutant_is_shown_by_an_order_or_a_check() -> None:
    assert mutant_names() == {killing.mutant.__name__ for killing in killings()}


@pytest.mark.thorough
def test_exploring_finds_what_the_default_order_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, symptom = next(entry[1:] for entry in CAUGHT_BY if entry[0] is rows.quarantine_skipped)
    rows.quarantine_skipped(monkeypatch)
    failure = explore(scenario.program).failure
    assert failure is not None and re.search(symptom, str(failure.error))
    assert failure.num_interleavings > 1, "the default order shows it: exploring had nothing to find"
