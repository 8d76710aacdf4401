"""Runs a child process whose output goes to a log file, and restarts it when it ends, as a container's policy does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.errors import BatonError, LocalPairError, ServiceDied
from baton.service_log import log_tail
from common.host.child_process import Child

ProcessRole = Literal["prefill", "decode", "gateway"]
READY_SERVICE: dict[ProcessRole, str] = {"prefill": "baton.v1.Prefill", "decode": "baton.v1.Inference"}
TLS_SETTINGS = frozenset(
    f"BATON_{name}"
    for name in (
        "TLS_CERT",
        "TLS_KEY",
        "TLS_CA",
        "PREFILL_TLS",
        "PREFILL_TLS_CA",
        "DECODE_TLS",
        "DECODE_TLS_CA",
        "DECODE_TLS_SERVER_NAME",
    )
)
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 60.0
WELL_S = 30.0
MAX_FAILED_STARTS = 5
_CONFIG_ERROR = 2


class ChildProcess:
    """Runs this Python interpreter with `arguments` as a child process in a session of its own.

    The child ends when this process does, for whatever reason. It uses no TLS: TLS settings in this process's
    environment do not reach it.
    """

    def __init__(self, *, name: str, address: str, arguments: Sequence[str], log_file: Path) -> None:
        self.name = name
        self.address = address
        self.log_file = log_file
        self.arguments = tuple(arguments)
        self._log_start = 0  # the log's size at the last start
        self._process: Child | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process. After its end it can be started again, and then appends to the same log."""
        assert not self.is_running, f"{self.name} is running"
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self._process = Child(
                [sys.executable, *self.arguments],
                env={name: value for name, value in os.environ.items() if name.upper() not in TLS_SETTINGS},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises ServiceDied when the process has ended."""
        if self._process is not None and (returncode := self._process.poll()) is not None:
            raise ServiceDied(self.name, returncode, self.log_tail(), self.log_file)

    def terminate(self) -> None:
        """Asks the process to finish its requests and end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process and its children at once."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Waits until the process has ended. Returns False if it is still running after `timeout_s`."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log_tail(self) -> str:
        """Returns the end of the output since the last start."""
        return log_tail(self.log_file, start=self._log_start)

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class ServiceProcess(ChildProcess):
    """The process of a prefill or decode service, or of the gateway."""

    def __init__(self, *, role: ProcessRole, **options: Any) -> None:
        super().__init__(**options)
        self.role = role


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
