"""What a rule reports: the places that break it."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Problem:
    """A place that breaks a rule. `line` counts from 1; 0 stands for the file as a whole."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def line_of(text: str, part: str) -> int:
    """Returns the number of the first line of `text` that holds `part`, or 0 if none does."""
    before, found, _ = text.partition(part)
    return before.count("\n") + 1 if found else 0


def set_apart(path: Path, kind: str, found: Set[str], wanted: Set[str]) -> Iterator[Problem]:
    """Yields the names that a file lacks, and those that it has too many."""
    for name in sorted(wanted - found):
        yield Problem(path, 0, f"{kind} {name} is missing")
    for name in sorted(found - wanted):
        yield Problem(path, line_of(path.read_text(), name), f"{kind} {name} does not exist")


def unequal(path: Path, what: str, found: object, wanted: object) -> Iterator[Problem]:
    """Yields a problem if `found`, which is described by `what`, is something else than what is wanted. Of two mappings
    it shows only what differs.
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        absent = object()
        differing = [key for key in {**found, **wanted} if found.get(key, absent) != wanted.get(key, absent)]
        found, wanted = ({key: each[key] for key in differing if key in each} for each in (found, wanted))
    if found != wanted:
        yield Problem(path, 0, f"{what}: {found!r}, not {wanted!r}")
