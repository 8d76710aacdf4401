"""The report of a run: the steps, their times and their problems."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
