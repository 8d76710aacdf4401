"""All mutants (engines with one rule removed), each with the check of tests/engine that fails under it. Such a check
sets the order of the streams itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.checks import checks_in, mutants_of
from tests.engine.mutants import batches
from tests.engine.mutants.kinds import Mutant

_ENGINE = Path(__file__).parents[1] / "engine"


@dataclass(frozen=True, slots=True)
class ShownByCheck:
    test: str
    check: Callable[[], None]
    mutant: Mutant

    def symptom(self) -> str:
        """Returns the message with which the check fails under the mutant. Raises AssertionError if the check
        passes.
        """
        with pytest.MonkeyPatch.context() as patch:
            self.mutant(patch)
            try:
                self.check()
            except AssertionError as failure:
                return str(failure)
        raise AssertionError(f"{self.test} does not show {self.mutant.__name__}")


def shown_by_checks() -> Iterator[ShownByCheck]:
    """Yields each mutant that a check of tests/engine says it is broken by."""
    for path in sorted(_ENGINE.glob("test_*.py")):
        module = importlib.import_module(f"tests.engine.{path.stem}")
        for name, check, run in checks_in(vars(module)):
            for mutant in mutants_of(check):
                yield ShownByCheck(f"{path.stem}: {name}", run, mutant)


def mutant_names() -> set[str]:
    """Returns the names of all mutants in tests/engine/mutants."""
    names = {
        batches.forgetful(operation, column).__name__
        for operation in ("filter_batch", "merge_batch")
        for column in batches.COLUMNS
    }
    for path in (_ENGINE / "mutants").glob("*.py"):
        module = importlib.import_module(f"tests.engine.mutants.{path.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_own = function.__module__ == module.__name__ and not name.startswith("_")
            if is_own and list(inspect.signature(function).parameters) == ["patch"]:
                names.add(name)
    return names
