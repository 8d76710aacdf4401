"""Tests that each mutant of the catalogue fails in some order of its scenario, and that this order can be replayed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.mutants.kinds import Mutant
from tests.interleavings.catalogue import (
    CAUGHT_BY,
    EXHAUSTIVE,
    FOUND_BY_EXPLORING,
    LARGE,
    NO_ORDER_HAS,
    NUM_ORDERS,
    SOME_ORDER_HAS,
    AnyScenario,
)
from tests.interleavings.explorer import explore, replay, sample, shorten
from tests.interleavings.shown import mutant_names, shown_by_checks

PAGE = Path(__file__).parents[2] / "benchmarks" / "orders.md"


@pytest.mark.parametrize(
    ("mutant", "scenario", "symptom"),
    [pytest.param(*entry, id=f"{entry[0].__name__}-{entry[1].name}") for entry in CAUGHT_BY],
)
def test_an_order_that_shows_it_is_found(
    mutant: Mutant, scenario: AnyScenario, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mutant(patch)
        failure = sample(scenario.program, num_runs=NUM_ORDERS, seed=0).failure
        assert failure is not None, "no order showed it"
        script = shorten(scenario.program, failure).script
        assert re.search(symptom, str(failure.error))
        assert re.search(symptom, str(replay(scenario.program, script)))
    assert replay(scenario.program, script) is None, "the engine as it is fails in this order too"


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [pytest.param(*entry, id=f"{entry[0].__name__}-{entry[1].name}") for entry in NO_ORDER_HAS],
)
def test_what_some_order_has_no_order_has_with_it(
    mutant: Mutant, scenario: AnyScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    report = sample(scenario.program, num_runs=NUM_ORDERS, seed=0)
    assert report.failure is None, "it is right in every order, only late"
    assert report.witnessed.isdisjoint(SOME_ORDER_HAS[scenario])


def test_every_mutant_is_shown_by_an_order_or_a_check() -> None:
    explored = {entry[0].__name__ for entry in (*CAUGHT_BY, *NO_ORDER_HAS)}
    assert mutant_names() == explored | {shown.mutant.__name__ for shown in shown_by_checks()}


def test_the_page_has_a_row_for_each_mutant_and_scenario() -> None:
    rows = {line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")}
    assert mutant_names() <= rows
    assert {scenario.name for scenario in (*EXHAUSTIVE, *LARGE)} <= rows


@pytest.mark.parametrize("mutant", FOUND_BY_EXPLORING, ids=lambda mutant: mutant.__name__)
def test_exploring_finds_it(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, symptom = next(entry[1:] for entry in CAUGHT_BY if entry[0] is mutant)
    mutant(monkeypatch)
    failure = explore(scenario.program).failure
    assert failure is not None and re.search(symptom, str(failure.error))
    assert failure.num_interleavings > 1, "the default order shows it: exploring had nothing to find"
