"""Computes how long to wait before the next attempt at something that keeps failing."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """Exponential backoff: the first wait is `first_s`, and each next one twice as long, up to `max_doublings` times.

    If an attempt succeeded, and its success lasted longer than the wait before it, waits start over at `first_s`.
    """

    def __init__(self, *, first_s: float, max_doublings: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._first_s = first_s
        self._max_doublings = max_doublings
        self._clock_s = clock_s
        self._num_waits = 0
        self._wait_s = 0.0
        self._succeeded_at_s: float | None = None

    def succeeded(self) -> None:
        """Notes that the attempt has succeeded. If its success lasts, the next wait is the shortest again."""
        self._succeeded_at_s = self._clock_s()

    def next_wait_s(self) -> float:
        """Notes that the attempt failed, or that its success has ended. Returns the next wait in seconds."""
        if self._succeeded_at_s is not None and self._clock_s() - self._succeeded_at_s > self._wait_s:
            self._num_waits = 0
        self._succeeded_at_s = None
        self._wait_s = self._first_s * 2 ** min(self._num_waits, self._max_doublings)
        self._num_waits += 1
        return self._wait_s
