"""Restarts a process that ended, like a container's restart policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import BatonError, LocalPairError, ServiceDied
from baton.service_process import ChildProcess

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 60.0
WELL_S = 30.0
MAX_FAILED_STARTS = 5
_CONFIG_ERROR = 2


@dataclass(frozen=True, slots=True)
class Ended:
    """A report that a process has ended with `error`, and will be started again after `restart_in_s` seconds."""

    error: BatonError
    restart_in_s: float


@dataclass(frozen=True, slots=True)
class StartedAgain:
    pid: int


class Restarts:
    """Restarts one process when it ends. Gives up if a restarted process ends because of its configuration, or if five
    restarts in a row end before the process is ready.

    The wait doubles before each start, up to a minute; it is short again after the process was ready for half a minute.
    """

    def __init__(self, process: ChildProcess, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = process
        self._clock = clock
        self._next_wait_s = FIRST_WAIT_S
        self._start_at_s: float | None = None
        self._ready_since_s: float | None = None
        self._num_failed = 0  # starts in a row after which the process did not become ready
        self._is_start_open = False  # the process was restarted and has not been ready since

    def look(self, *, is_ready: bool) -> Ended | StartedAgain | None:
        """Checks the process once, and starts it again when its wait is over. Must be called repeatedly.

        `is_ready` says whether the process reports itself ready. Returns Ended or StartedAgain, or None if nothing
        happened. Raises ServiceDied if the process has ended and will not be restarted.
        """
        now_s = self._clock()
        if self._start_at_s is not None:
            if now_s < self._start_at_s:
                return None
            try:
                self._process.start()
            except OSError as error:  # there is no memory for a process, or no room for its log
                return self._ended(LocalPairError(f"{self._process.name} cannot be started: {error}"), now_s)
            self._start_at_s = None
            self._is_start_open = True
            return StartedAgain(self._process.pid)
        try:
            self._process.check()
        except ServiceDied as error:
            self._num_failed += self._is_start_open
            if self._is_start_open and (error.returncode == _CONFIG_ERROR or self._num_failed >= MAX_FAILED_STARTS):
                raise
            return self._ended(error, now_s)
        if is_ready:
            self._num_failed, self._is_start_open = 0, False
        if not is_ready:
            self._ready_since_s = None
        elif self._ready_since_s is None:
            self._ready_since_s = now_s
        elif now_s - self._ready_since_s >= WELL_S:
            self._next_wait_s = FIRST_WAIT_S
        return None

    def _ended(self, error: BatonError, now_s: float) -> Ended:
        self._ready_since_s = None
        wait_s, self._next_wait_s = self._next_wait_s, min(2 * self._next_wait_s, MAX_WAIT_S)
        self._start_at_s = now_s + wait_s
        return Ended(error, wait_s)
