"""Runs a child process whose output goes to a log file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from baton.errors import ServiceDied
from baton.service_log import log_tail
from common.host.child_process import Child

Role = Literal["prefill", "decode", "gateway"]
READY_SERVICE: dict[Role, str] = {"prefill": "baton.v1.Prefill", "decode": "baton.v1.Inference"}
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


class ChildProcess:
    """Runs this Python interpreter with `arguments` as a child process in a session of its own.

    The process ends with this one, whatever ends it. It uses no TLS, and TLS settings in this process's environment do
    not reach it.
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

    def __init__(self, *, role: Role, **options: Any) -> None:
        super().__init__(**options)
        self.role = role
