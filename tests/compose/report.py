"""The report of a run: the steps, their times and their problems."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.compose.command import CommandFailed


class Report:
    """Prints the steps as they happen. `problems` lists the reasons why the run fails."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._begun_at_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_at_s

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Runs the block as one step of the run. An error in it is noted as a problem and ends the run."""
        print(f"==> {title}", flush=True)
        begun_at_s = time.monotonic()
        try:
            yield
        except (CommandFailed, TimeoutError, OSError) as error:
            self.problem(f"{title}: {error}")
            raise StepFailed(title) from error
        print(f"    {time.monotonic() - begun_at_s:.1f} s", flush=True)

    def note(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def problem(self, text: str) -> None:
        self.problems.append(text)
        print(f"    PROBLEM {text}", flush=True)

    def expect(self, condition: bool, text: str) -> None:
        """Notes `text`, which states what should be true. If `condition` is False, it is a problem."""
        if condition:
            self.note(text)
        else:
            self.problem(f"not so: {text}")


class StepFailed(Exception):
    """Raised after a failed step, whose problem is in the report. The later steps would make no sense without it."""


def reported(run: Callable[[Report], None]) -> int:
    """Runs `run`, prints the problems that it found, and returns the exit status. A step that fails ends the run."""
    report = Report()
    # A run that is told to stop removes its containers too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(StepFailed):
        run(report)
    print(f"\n{report.elapsed_s:.0f} s in all, {len(report.problems)} problems")
    for problem in report.problems:
        print(f"- {problem}")
    return 1 if report.problems else 0
