"""docs/invariants.md names every check and mutant of the engine, and docs/relay.md only mutants that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts.lint.pages import DOCS
from scripts.lint.problem import ROOT, Problem, line_of, set_apart

PAGE, RELAY = DOCS / "invariants.md", DOCS / "relay.md"
CHECKS = ROOT / "tests/engine"
NUM_INVARIANTS = 15


def every_invariant_is_in_the_table() -> Iterator[Problem]:
    there = set(re.findall(r"^\| (I\d+) \|", PAGE.read_text(), re.MULTILINE))
    yield from set_apart(PAGE, "invariant", there, {f"I{number}" for number in range(1, NUM_INVARIANTS + 1)})


def every_check_is_in_the_table() -> Iterator[Problem]:
    there = set(re.findall(r"`(\w+: check_\w+)`", PAGE.read_text()))
    yield from set_apart(PAGE, "check", there, _defined(CHECKS.glob("test_*.py"), r"check_\w+", ": "))


def every_mutant_is_in_the_table() -> Iterator[Problem]:
    there = set(re.findall(r"`(\w+\.[a-z_]+)`", PAGE.read_text()))
    yield from set_apart(PAGE, "mutant", there, _mutants())


def each_mutant_breaks_a_check_of_its_row() -> Iterator[Problem]:
    """A row whose mutants an exploration of orders shows names a file of tests/interleavings instead of a check."""
    broken = _mutants_by_check()
    for number, row in enumerate(PAGE.read_text().splitlines(), start=1):
        checks = re.findall(r"`(\w+: check_\w+)`", row)
        if checks and "tests/interleavings" not in row:
            shown = set().union(*(broken.get(check, set()) for check in checks))
            for mutant in sorted({*re.findall(r"`\w+\.([a-z_]+)`", row)} - shown):
                yield Problem(PAGE, number, f"{mutant} breaks none of {', '.join(checks)}")


def the_page_on_the_relay_names_mutants_that_exist() -> Iterator[Problem]:
    text, mutants = RELAY.read_text(), _mutants()
    files = "|".join({mutant.partition(".")[0] for mutant in mutants})
    for name in sorted({*re.findall(rf"`((?:{files})\.[a-z_]+)`", text)} - mutants):
        yield Problem(RELAY, line_of(text, name), f"mutant {name} does not exist")


def _mutants_by_check() -> dict[str, set[str]]:
    """Returns the names of the mutants in the decorators of each check, or in a constant that a decorator names."""
    found: dict[str, set[str]] = {}
    for path in CHECKS.glob("test_*.py"):
        body = ast.parse(path.read_text()).body
        constants = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
        for check in body:
            if isinstance(check, ast.FunctionDef) and check.name.startswith("check_"):
                parts = [part for decorator in check.decorator_list for part in ast.walk(decorator)]
                parts += [
                    part
                    for name in parts
                    if isinstance(name, ast.Name) and name.id in constants
                    for part in ast.walk(constants[name.id])
                ]
                names = {part.attr for part in parts if isinstance(part, ast.Attribute)}
                found[f"{path.stem.removeprefix('test_')}: {check.name}"] = names
    return found


def _mutants() -> set[str]:
    files = [path for path in (CHECKS / "mutants").glob("*.py") if path.stem != "kinds"]
    return _defined(files, "[a-z][a-z_]*", ".")


def _defined(paths: Iterable[Path], pattern: str, separator: str) -> set[str]:
    """Returns the functions whose names match `pattern`, each after the stem of its file without test_."""
    return {
        f"{path.stem.removeprefix('test_')}{separator}{name}"
        for path in paths
        for name in re.findall(rf"^def ({pattern})\(", path.read_text(), re.MULTILINE)
    }
