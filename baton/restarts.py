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
    """A process ended with `error`; it is started again in `restart_in_s`."""

    error: BatonError
    restart_in_s: float


@dataclass(frozen=True, slots=True)
class StartedAgain:
    pid: int


class Restarts:
    """Restarts one process. The wait doubles before each start, up to a minute, and is short again once the process was
    ready for half a minute. Only the thread that first started the process may use it; the process dies with it.
    """

    def __init__(self, process: ChildProcess, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = process
        self._clock = clock
        self._next_wait_s = FIRST_WAIT_S
        self._start_at_s: float | None = None
        self._ready_since_s: float | None = None
        self._num_failed = 0  # consecutive starts after which it was not ready
        self._is_start_open = False  # restarted, and not ready since

    def look(self, *, is_ready: bool) -> Ended | StartedAgain | None:
        """Check the process once; call this repeatedly. `is_ready` is its health. Returns what happened, if anything.

        Raises ServiceDied when it is not restarted.
        """
        now_s = self._clock()
        if self._start_at_s is not None:
            if now_s < self._start_at_s:
                return None
            try:
                self._process.start()
            except OSError as error:  # no room for a process, or for its log
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
