"""Prints which test fails on each mutant (an engine with one rule removed), and runs none of them.

python -m tests.interleavings.killings
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.engine.checks import runs_in
from tests.engine.mutants import batches
from tests.engine.mutants.kinds import Mutant
from tests.interleavings.catalogue import CAUGHT_BY, NO_ORDER_HAS, AnyScenario, marks_of
from tests.support.costs import command_for

_TESTS = Path(__file__).parents[1]
_INVARIANTS = _TESTS.parent / "docs" / "invariants.md"


@dataclass(frozen=True, slots=True)
class Killing:
    """A mutant, and the test that shows it. `is_thorough` says that only the thorough run has that test."""

    mutant: Mutant
    test: str
    is_thorough: bool


def killings() -> Iterator[Killing]:
    """Yields the mutants with the checks of tests/engine, and then the orders of the streams, that show them."""
    for path in sorted((_TESTS / "engine").glob("test_*.py")):
        module = importlib.import_module(f"tests.engine.{path.stem}")
        for run in runs_in(vars(module)):
            for breach in run.breaches:
                test = f"tests/engine/{path.name}::test_is_broken_by[{run.id_of(breach)}]"
                yield Killing(breach.mutant, test, bool(run.marks))
    page = "tests/interleavings/test_mutants.py"
    for mutant, scenario, _ in CAUGHT_BY:
        test = f"{page}::test_an_order_that_shows_it_is_found[{id_of(mutant, scenario)}]"
        yield Killing(mutant, test, bool(marks_of(scenario)))
    for mutant, scenario in NO_ORDER_HAS:
        test = f"{page}::test_what_some_order_has_no_order_has_with_it[{id_of(mutant, scenario)}]"
        yield Killing(mutant, test, bool(marks_of(scenario)))


def id_of(mutant: Mutant, scenario: AnyScenario, *_: object) -> str:
    return f"{mutant.__name__}-{scenario.name}"


def mutant_names() -> set[str]:
    """Returns the names of all mutants in tests/engine/mutants."""
    names = {
        batches.forgetful(operation, column).__name__
        for operation in ("filter_batch", "merge_batch")
        for column in batches.COLUMNS
    }
    for path in (_TESTS / "engine" / "mutants").glob("*.py"):
        module = importlib.import_module(f"tests.engine.mutants.{path.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_own = function.__module__ == module.__name__ and not name.startswith("_")
            if is_own and list(inspect.signature(function).parameters) == ["patch"]:
                names.add(name)
    return names


def rules_broken() -> dict[str, str]:
    """Returns the ids of the invariants that docs/invariants.md says each mutant breaks."""
    broken: dict[str, list[str]] = {}
    for line in _INVARIANTS.read_text().splitlines():
        for mutant in re.findall(r"`\w+\.([a-z_]+)`", line):
            broken.setdefault(mutant, []).append(line.split(" | ")[0].removeprefix("| "))
    return {mutant: ", ".join(dict.fromkeys(ids)) for mutant, ids in broken.items()}


def main() -> None:
    rules = rules_broken()
    print("| mutant | invariant | test that fails on it | run by |\n|---|---|---|---|")
    for killing in killings():
        name = killing.mutant.__name__
        rule = rules.get("forgetful" if "_forgets_" in name else name, "")
        command = command_for(killing.test.partition("::")[0], thorough=killing.is_thorough)
        print(f"| {name} | {rule} | {killing.test} | {command} |")


if __name__ == "__main__":
    main()
