"""docs/invariants.md names every check and mutant, and only those that exist. docs/relay.md names only those that
exist.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
DOCUMENT = (DOCS / "invariants.md").read_text()


def defined(paths: list[Path], pattern: str) -> set[tuple[str, str]]:
    """Returns the functions whose names match `pattern`, as pairs of (file stem without test_, function name)."""
    return {
        (path.stem.removeprefix("test_"), name)
        for path in paths
        for name in re.findall(rf"^def ({pattern})\(", path.read_text(), re.MULTILINE)
    }


def test_every_check_is_in_the_table() -> None:
    in_table = set(re.findall(r"`(\w+): (check_\w+)`", DOCUMENT))
    assert in_table == defined(sorted(HERE.glob("test_*.py")), r"check_\w+")


def test_every_mutant_is_in_the_table() -> None:
    in_table = set(re.findall(r"`(\w+)\.([a-z_]+)`", DOCUMENT))
    there = defined(sorted((HERE / "mutants").glob("*.py")), "[a-z][a-z_]*")
    assert in_table == {mutant for mutant in there if mutant[0] != "kinds"}


def test_the_page_on_the_relay_names_mutants_that_exist() -> None:
    there = defined(sorted((HERE / "mutants").glob("*.py")), "[a-z][a-z_]*")
    files = "|".join({file for file, _ in there})
    named = set(re.findall(rf"`({files})\.([a-z_]+)`", (DOCS / "relay.md").read_text()))
    assert len(named) > 20
    assert named <= there


def test_every_invariant_is_in_the_table() -> None:
    assert set(re.findall(r"^\| (I\d+) \|", DOCUMENT, re.MULTILINE)) == {f"I{number}" for number in range(1, 16)}
