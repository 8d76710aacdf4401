"""Checks the rules of this repository that other linters cannot check, and prints each place that breaks one.

    python -m scripts.lint                 all rules
    python -m scripts.lint field_rules     the rules of one module in this folder

The exit status is 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from scripts.lint.problem import ROOT, Problem

MODULES = sorted(
    module.name
    for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    if module.name not in ("__main__", "exports", "pages", "problem")
)
"""The modules of this folder with rules: public functions that take nothing and return an Iterator[Problem]."""

Rule = Callable[[], Iterable[Problem]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(MODULES)}")
    chosen = parser.parse_args(arguments).modules
    if unknown := sorted({*chosen} - {*MODULES}):
        parser.error(f"no module {', '.join(unknown)}")
    num_problems = num_rules = 0
    for module in chosen or MODULES:
        rules = _rules_of(importlib.import_module(f"scripts.lint.{module}"))
        assert rules, f"{module} has no rule"
        num_rules += len(rules)
        for rule in rules:
            for problem in _problems_of(rule):
                print(f"{problem} [{module}.{rule.__name__}]")
                num_problems += 1
    print(f"{num_rules} rules, {num_problems} problems")
    return 1 if num_problems else 0


def _problems_of(rule: Rule) -> Iterator[Problem]:
    """Yields what a rule reports. A rule that raises has found something that it did not expect."""
    try:
        yield from rule()
    except Exception as error:
        traceback.print_exc()
        yield Problem(ROOT, 0, f"{type(error).__name__}: {error}")


def _rules_of(module: ModuleType) -> list[Rule]:
    return [
        function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
        if inspect.signature(function) == inspect.Signature(return_annotation="Iterator[Problem]")
    ]


if __name__ == "__main__":
    sys.exit(main())
