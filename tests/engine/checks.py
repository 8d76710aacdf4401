"""Turns the checks of a file into its tests: each check holds on the engine, and fails on the mutants that break it.

@broken_by(rows.quarantine_skipped, "given out while")
def check_nothing_is_reused_while_a_forward_holds_it() -> None: ...

test_holds = holding(globals())
test_is_broken_by = breaking(globals())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import pytest

from tests.engine.mutants.kinds import Mutant

Check = TypeVar("Check", bound=Callable[..., None])


def broken_by(mutant: Mutant, symptom: str) -> Callable[[Check], Check]:
    """Says that the check below fails on this mutant, with a message that matches `symptom`."""
    return broken_by_each({mutant: symptom})


def broken_by_each(mutants: Mapping[Mutant, str]) -> Callable[[Check], Check]:
    """Says that the check below fails on each of these mutants, with a message that matches its symptom."""

    def note(check: Check) -> Check:
        vars(check)["mutants"] = {**mutants, **mutants_of(check)}
        return check

    return note


def in_cases(**cases: object) -> Callable[[Check], Check]:
    """Runs the check below once for each case, with the case's value as its argument."""

    def note(check: Check) -> Check:
        vars(check)["cases"] = cases
        return check

    return note


def mutants_of(check: Callable[..., None]) -> Mapping[Mutant, str]:
    """Returns the mutants that break a check, each with its symptom."""
    return vars(check).get("mutants", {})


def checks_in(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Callable[..., None], Callable[[], None]]]:
    """Yields the checks of a file in order: a name for each case, the check, and the check in that case."""
    for name, check in namespace.items():
        if not name.startswith("check_") or check.__module__ != namespace["__name__"]:
            continue
        cases = vars(check).get("cases")
        if cases is None:
            yield name, check, check
        else:
            for case, value in cases.items():
                yield f"{name}-{case}", check, partial(check, value)


def holding(namespace: Mapping[str, Any]) -> Callable[..., None]:
    """Returns the test that runs every check of a file, in every case."""
    runs = [
        pytest.param(run, id=name, marks=vars(check).get("pytestmark", ())) for name, check, run in checks_in(namespace)
    ]

    @pytest.mark.parametrize("run", runs)
    def test_holds(run: Callable[[], None]) -> None:
        run()

    return test_holds


def breaking(namespace: Mapping[str, Any]) -> Callable[..., None]:
    """Returns the test that runs every check of a file on every mutant that breaks it, in every case."""
    runs = [
        pytest.param(run, mutant, symptom, id=f"{name}-{mutant.__name__}", marks=vars(check).get("pytestmark", ()))
        for name, check, run in checks_in(namespace)
        for mutant, symptom in mutants_of(check).items()
    ]

    @pytest.mark.parametrize(("run", "mutant", "symptom"), runs)
    def test_is_broken_by(
        run: Callable[[], None], mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mutant(monkeypatch)
        with pytest.raises(AssertionError, match=symptom):
            run()

    return test_is_broken_by
