"""Measures how long the other process has been silent, and after how long it counts as lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.device.stream import LONGEST_LOOK_S

SAYS_EVERY_S = 1.0
"""Either side says something at least this often."""

_LEAST_LIMIT_S = 4 * SAYS_EVERY_S


class Silence:
    """The time since the other side was heard, in seconds. It begins at -`patience_s`, so that the other side has more
    time until it is heard first.

    Each look adds at most LONGEST_LOOK_S.
    """

    def __init__(self, *, patience_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._silent_s = -patience_s

    def heard(self) -> None:
        self._silent_s = 0.0

    def look(self) -> float:
        """Returns the time of silence. Call it often."""
        now_s = self._clock()
        self._silent_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        return self._silent_s


def longest_silence_s(stall_timeout_s: float) -> float:
    """Returns the seconds of silence after which a process counts as lost: `stall_timeout_s`, but at least 4."""
    return max(stall_timeout_s, _LEAST_LIMIT_S)
