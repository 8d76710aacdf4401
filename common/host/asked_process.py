"""A service's side of a child process: asked one thing at a time, and killed where it does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import structlog

from common.host import answering as protocol

_END_TIMEOUT_S = 10.0

_log = structlog.get_logger(__name__)


class ChildFailed(Exception):
    """The process did not answer in time, or has ended. It was killed, but may be stuck in the kernel.

    `returncode` is the process's, or None where it did not start or does not end.
    """

    def __init__(self, message: str, returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


class ChildEnded(ChildFailed):
    """The process had ended, or did so over what it was asked."""


class AskedProcess:
    """Event loop only, one task at a time. See `common.host.answering` for what it runs."""

    def __init__(self, process: Process, timeout_s: float, end_timeout_s: float = _END_TIMEOUT_S) -> None:
        """Each answer takes at most `timeout_s`. Once killed it has `end_timeout_s` to end."""
        self._process = process
        self._timeout_s = timeout_s
        self._end_timeout_s = end_timeout_s
        self._is_killed = False

    @classmethod
    async def spawn(cls, module: str, *arguments: str, timeout_s: float, pass_fds: Sequence[int] = ()) -> Self:
        """Raises ChildFailed."""
        command = (sys.executable, "-m", module, *arguments)
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, pass_fds=pass_fds)
        except OSError as error:
            raise ChildFailed(f"no process can be started: {error}") from error
        return cls(process, timeout_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def is_usable(self) -> bool:
        return not (self._is_killed or self.has_ended)

    def kill(self) -> None:
        """Idempotent."""
        self._is_killed = True
        if not self.has_ended:
            with suppress(ProcessLookupError):  # not `Process.kill`, which takes the status away from who waits for it
                os.kill(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Returns when it has ended, or, which is logged, does not end."""
        self.kill()
        try:
            async with asyncio.timeout(self._end_timeout_s):
                await self._process.wait()
        except TimeoutError:
            _log.error("the process %s was killed and has not ended", self.pid)

    async def first_answer(self) -> tuple[int, bytes]:
        """The one that comes unasked, of a process that begins with one. Raises ChildFailed."""
        return await self._exchange(b"", self._timeout_s)

    async def ask(self, content: bytes, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Status and content of the answer. Raises ChildFailed."""
        command = protocol.LENGTH.pack(len(content)) + content
        return await self._exchange(command, self._timeout_s if timeout_s is None else timeout_s)

    async def _exchange(self, command: bytes, timeout_s: float) -> tuple[int, bytes]:
        """A task that is cancelled here leaves an answer that nobody takes: the process is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        answer, failure, kind = b"", "", ChildFailed
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(command)
                await self._process.stdin.drain()
                length = await self._process.stdout.readexactly(protocol.LENGTH.size)
                answer = await self._process.stdout.readexactly(protocol.LENGTH.unpack(length)[0])
        except TimeoutError:
            failure = f"its process did not answer within {timeout_s:g} s"
        except (OSError, asyncio.IncompleteReadError):
            failure, kind = "its process ended", ChildEnded
        finally:
            if not answer:
                await self.close()
        if not answer:
            end = f"status {self._process.returncode}" if self.has_ended else f"process {self.pid} does not end"
            raise kind(f"{failure} ({end})", self._process.returncode)
        return answer[0], answer[1:]
