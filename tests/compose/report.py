"""What was done, how long it took, and what was wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.compose.command import CommandFailed


class Report:
    """Prints as it goes; `problems` are the reasons for which the run fails."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._begun_at_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_at_s

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A part of the run. What it raises ends the run, after the problem is noted."""
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
        """`text` says what should be so."""
        if condition:
            self.note(text)
        else:
            self.problem(f"not so: {text}")


class StepFailed(Exception):
    """What comes after makes no sense; the problem is in the report."""
