"""Pairs whose services are forked from one warm process. They are real processes that tests can kill and drain, but
start without importing anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from baton.local_pair import LocalPair
from baton.service_process import ProcessRole, ServiceProcess
from tests.support.black_hole import BlackHoleProxy

ROOT = Path(__file__).parents[2]
START_BOUND_S = 120.0


class ForkedProcess:
    """A child of the fork server. It has the methods of `subprocess.Popen` that a ServiceProcess uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, and the server's message about that is on its way
                os.kill(self.pid, number)

    def end(self, returncode: int) -> None:
        self.returncode = returncode
        self._has_ended.set()


class ForkServer:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # it must have no other thread when it forks
            text=True,
        )
        self._started: queue.Queue[ForkedProcess] = queue.Queue()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def fork(self, arguments: tuple[str, ...], log_file: Path) -> ForkedProcess:
        assert self._process.stdin is not None
        with self._lock:
            order = {"arguments": list(arguments), "log_file": str(log_file)}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return self._started.get(timeout=START_BOUND_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        children: dict[int, ForkedProcess] = {}
        ended_early: dict[int, int] = {}
        for line in self._process.stdout:
            said = json.loads(line)
            if isinstance(said, int):
                child = children[said] = ForkedProcess(said)
                if said in ended_early:
                    child.end(ended_early.pop(said))
                self._started.put(child)
            elif (child := children.pop(said[0], None)) is not None:
                child.end(said[1])
            else:
                ended_early[said[0]] = said[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(START_BOUND_S)
        self._reader.join(START_BOUND_S)
        self._process.stdout.close()


class ForkedService(ServiceProcess):
    def __init__(self, server: ForkServer, **options: Any) -> None:
        super().__init__(**options)
        self._server = server

    def start(self) -> None:
        assert not self.is_running, f"{self.name} is running"
        self._process = self._server.fork(self.arguments, self.log_file)  # type: ignore[assignment]


def forked_pairs(server: ForkServer) -> Callable[..., LocalPair]:
    """Returns a function that makes LocalPairs whose services are forked from `server`. The function's argument
    `through` lists proxies: the decode services then reach the prefill services through them.
    """

    def pair(*, through: Sequence[BlackHoleProxy] = (), **options: Any) -> LocalPair:
        proxies = ",".join(proxy.address for proxy in through)
        unused = iter(through)

        def new_service(
            *, role: ProcessRole, address: str, arguments: tuple[str, ...], **others: Any
        ) -> ServiceProcess:
            if through and role == "prefill":
                host, _, port = address.rpartition(":")
                next(unused).target = host, int(port)
            if through and role == "decode":
                (direct,) = (argument for argument in arguments if argument.startswith("--prefill="))
                arguments = tuple(f"--prefill={proxies}" if each is direct else each for each in arguments)
            return ForkedService(server, role=role, address=address, arguments=arguments, **others)

        return LocalPair(new_service=new_service, **options)

    return pair
