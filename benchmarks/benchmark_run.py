"""Records a benchmark's results with the date, machine and command."""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """The date, machine and command of a benchmark's run. `date` is in ISO format."""

    date: str
    machine: str
    command: str

    @classmethod
    def of(cls, module: str) -> Self:
        """Describes this process as today's run of `benchmarks.<module>`."""
        return cls(
            date=datetime.date.today().isoformat(),
            machine=describe_machine(),
            command=" ".join([f"python -m benchmarks.{module}", *sys.argv[1:]]),
        )

    def heading(self, title: str, about: str) -> list[str]:
        """Returns the heading lines of a table, without the blank line that follows. `about` ends with a full stop."""
        return [f"# {title}, {self.date}", "", f"{self.machine}; {about} `{self.command}`"]

    def save(self, name: str, table: str, figures: dict[str, Any] | None = None) -> None:
        """Writes `table` to benchmarks/results as `<date>-<name>.md`, and `figures`, if given, as `.json` beside it."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.date}-{name}"
        path.with_suffix(".md").write_text(table + "\n")
        if figures is not None:
            path.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
