"""Turns the checks of a file into its tests: each check holds on the engine, and fails on the mutants that break it.

@broken_by(rows.quarantine_skipped, "given out while")
def check_nothing_is_reused_while_a_forward_holds_it() -> None: ...

test_holds = holding(globals())
test_is_broken_by = breaking(globals())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest

from tests.engine.mutants.kinds import Mutant

Check = TypeVar("Check", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Breach:
    """A mutant that breaks a check, in every case or in the case `only`. The check then fails with a message that
    matches `symptom`.
    """

    mutant: Mutant
    symptom: str
    only: str


@dataclass(frozen=True, slots=True)
class Run:
    """A check in one of its cases, with the mutants that break it."""

    name: str
    check: Callable[[], None]
    breaches: tuple[Breach, ...]
    marks: tuple[pytest.MarkDecorator, ...]

    def id_of(self, breach: Breach) -> str:
        return f"{self.name}-{breach.mutant.__name__}"


def broken_by(mutant: Mutant, symptom: str, *, only: str = "") -> Callable[[Check], Check]:
    """Says that the check below fails on this mutant, with a message that matches `symptom`: in every case, or in the
    case `only`.
    """
    return broken_by_each({mutant: symptom}, only=only)


def broken_by_each(mutants: Mapping[Mutant, str], *, only: str = "") -> Callable[[Check], Check]:
    """Says that the check below fails on each of these mutants, with a message that matches its symptom."""
    breaches = tuple(Breach(mutant, symptom, only) for mutant, symptom in mutants.items())

    def note(check: Check) -> Check:
        vars(check)["breaches"] = (*breaches, *vars(check).get("breaches", ()))
        return check

    return note


def in_cases(**cases: object) -> Callable[[Check], Check]:
    """Runs the check below once for each case, with the case's value as its argument."""

    def note(check: Check) -> Check:
        vars(check)["cases"] = cases
        return check

    return note


def runs_in(namespace: Mapping[str, Any]) -> Iterator[Run]:
    """Yields the checks of a file in order, each in all its cases."""
    for name, check in namespace.items():
        if not name.startswith("check_") or check.__module__ != namespace["__name__"]:
            continue
        noted = vars(check)
        breaches, marks = noted.get("breaches", ()), tuple(noted.get("pytestmark", ()))
        assert all(breach.only in ("", *noted.get("cases", ())) for breach in breaches), f"{name}: no such case"
        if "cases" not in noted:
            yield Run(name, check, breaches, marks)
        for case, value in noted.get("cases", {}).items():
            of_case = tuple(breach for breach in breaches if breach.only in ("", case))
            yield Run(f"{name}-{case}", partial(check, value), of_case, marks)


def holding(namespace: Mapping[str, Any]) -> Callable[..., None]:
    """Returns the test that runs every check of a file, in every case."""

    @pytest.mark.parametrize(
        "check", [pytest.param(run.check, id=run.name, marks=run.marks) for run in runs_in(namespace)]
    )
    def test_holds(check: Callable[[], None]) -> None:
        check()

    return test_holds


def breaking(namespace: Mapping[str, Any]) -> Callable[..., None]:
    """Returns the test that runs every check of a file on every mutant that breaks it."""

    @pytest.mark.parametrize(
        ("check", "mutant", "symptom"),
        [
            pytest.param(run.check, breach.mutant, breach.symptom, id=run.id_of(breach), marks=run.marks)
            for run in runs_in(namespace)
            for breach in run.breaches
        ],
    )
    def test_is_broken_by(
        check: Callable[[], None], mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mutant(monkeypatch)
        with pytest.raises(AssertionError, match=symptom):
            check()

    return test_is_broken_by
