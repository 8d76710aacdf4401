"""A container that is killed under load at a moment when it has requests to lose."""

from __future__ import annotations

import re
from typing import Protocol

from tests.compose.command import CommandFailed

_ROWS = re.compile(r'^baton_rows\{state="(\w+)"\} (\S+)$', re.MULTILINE)


class Killable(Protocol):
    def metrics(self) -> str: ...

    def crash(self, *, image: str) -> None: ...


class Victim:
    """Kills `container` once, as soon as it has rows in flight after at least `kill_after` answers of a load.

    `num_rows_lost` is the number of rows it had at that moment, and 0 before.
    """

    def __init__(self, container: Killable, *, image: str, kill_after: int) -> None:
        self._container = container
        self._image = image
        self._kill_after = kill_after
        self.num_rows_lost = 0

    def on_answer(self, num_ended: int) -> None:
        if self.num_rows_lost or num_ended < self._kill_after:
            return
        if num_rows := rows_in_flight(self._container.metrics()):
            self._container.crash(image=self._image)
            self.num_rows_lost = num_rows


def rows_in_flight(metrics: str) -> int:
    """Returns the number of rows in use, from a service's metrics."""
    rows = {state: int(float(count)) for state, count in _ROWS.findall(metrics)}
    if "free" not in rows:
        raise CommandFailed("a service tells no baton_rows")
    return sum(count for state, count in rows.items() if state != "free")
