"""docs/invariants.md names every check and mutant of the engine, and docs/relay.md only mutants that exist."""

from __future__ import annotations

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


def the_page_on_the_relay_names_mutants_that_exist() -> Iterator[Problem]:
    text, mutants = RELAY.read_text(), _mutants()
    files = "|".join({mutant.partition(".")[0] for mutant in mutants})
    for name in sorted({*re.findall(rf"`((?:{files})\.[a-z_]+)`", text)} - mutants):
        yield Problem(RELAY, line_of(text, name), f"mutant {name} does not exist")


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
