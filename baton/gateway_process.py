"""The gateway as a child process of this one."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.errors import InvalidArgument, StartTimedOut
from baton.free_ports import free_ports
from baton.service_process import ChildProcess
from common.addresses import address_of, host_and_port

POLL_INTERVAL_S = 0.1
HEALTH_TIMEOUT_S = 3.0
KILL_TIMEOUT_S = 10.0


def checked_listen(address: str) -> str:
    """Where --gateway-listen has it listen; port 0 becomes a free one. Raises InvalidArgument without HOST:PORT."""
    try:
        host, port = host_and_port(address)
        if not host.isascii() or "%" in host:  # it becomes part of a URL
            raise ValueError(f"{address!r} is not HOST:PORT")
    except ValueError as error:
        raise InvalidArgument(
            f"--gateway-listen: {error}", reason="INVALID_FIELD", metadata={"field": "gateway_listen"}
        ) from None
    return address_of(host, port or free_ports(1)[0])


class GatewayProcess:
    """`python -m gateway` in front of `decode`, with `metrics` on its status page.

    A context manager that is entered once /health is well, and left once the process has ended. `listen` is what
    `checked_listen` gives.
    """

    def __init__(
        self,
        *,
        listen: str,
        decode: Sequence[str],
        metrics: Sequence[str],
        log_dir: Path,
        start_timeout_s: float,
        stop_timeout_s: float,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self.url = f"http://{listen}"
        self.process = ChildProcess(
            name="gateway",
            address=listen,
            arguments=(
                "-m",
                "gateway",
                f"--listen={listen}",
                f"--decode={','.join(decode)}",
                f"--metrics-targets={','.join(metrics)}",
            ),
            log_file=log_dir / "gateway.log",
        )

    def check(self) -> None:
        """Raises ServiceDied when the process has ended."""
        self.process.check()

    def __enter__(self) -> Self:
        try:
            self.process.start()
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        idle = threading.Event()
        while not self._is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise StartTimedOut((self.process.name,), self._start_timeout_s, self.process.log_tail())
            idle.wait(POLL_INTERVAL_S)

    def _is_ready(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S) as response:
                return bool(response.status == HTTPStatus.OK)
        except urllib.error.HTTPError as refusal:
            refusal.close()
        except (OSError, http.client.HTTPException, ValueError):
            pass  # it does not listen yet, or another does; its own end says why
        return False

    def _stop(self) -> None:
        try:
            self.process.terminate()
            self.process.wait(self._stop_timeout_s)
        finally:
            self.process.kill()
            self.process.wait(KILL_TIMEOUT_S)
