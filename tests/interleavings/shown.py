"""All mutants (engines with one rule removed), each with the check of tests/engine that fails under it. Such a check
sets the order of the streams itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.mutants import batches
from tests.engine.mutants.kinds import Check, Mutant

_ENGINE = Path(__file__).parents[1] / "engine"


@dataclass(frozen=True, slots=True)
class ShownByCheck:
    test: str
    check: Check
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
    """Yields the parameters of all tests named test_is_broken_by: (check, mutant, symptom)."""
    for path in sorted(_ENGINE.glob("test_*.py")):
        test = getattr(importlib.import_module(f"tests.engine.{path.stem}"), "test_is_broken_by", None)
        for mark in getattr(test, "pytestmark", ()):
            names, entries = mark.args
            for entry in entries:
                values = dict(zip(names, entry, strict=True))
                name = f"{path.stem}: {values['check'].__name__}"
                yield ShownByCheck(name, values["check"], values["mutant"])


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
