"""The service's side of a protocol in which it sends commands to a child process by pipes, one at a time.

The child is killed if it does not answer in time.
"""

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
    """The child process did not start, did not answer in time, or has ended.

    `returncode` is its exit status. It is None if the process did not start, or was killed and is stuck in the kernel.
    """

    def __init__(self, message: str, returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


class ChildEnded(ChildFailed):
    """The child process had ended before the command, or ended while it carried it out."""


class AskedProcess:
    """A child process that answers commands. Its own side of the protocol is `common.host.answering`.

    Use it on the event loop only, from one task at a time.
    """

    def __init__(self, process: Process, timeout_s: float, end_timeout_s: float = _END_TIMEOUT_S) -> None:
        """Wraps a running process. Each answer may take `timeout_s`; after a kill its end may take `end_timeout_s`."""
        self._process = process
        self._timeout_s = timeout_s
        self._end_timeout_s = end_timeout_s
        self._is_killed = False

    @classmethod
    async def spawn(cls, module: str, *arguments: str, timeout_s: float, pass_fds: Sequence[int] = ()) -> Self:
        """Starts `python -m module arguments` as a child process. Raises ChildFailed if that is not possible.

        `timeout_s` limits each answer. The child inherits the descriptors `pass_fds`.
        """
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
        """False if the process has ended or was killed."""
        return not (self._is_killed or self.has_ended)

    def kill(self) -> None:
        """Kills the process, without waiting for its end. A second call does nothing."""
        self._is_killed = True
        if not self.has_ended:
            with suppress(ProcessLookupError):  # `Process.kill` would take the exit status, which `wait` needs
                os.kill(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kills the process and waits for its end. If it does not end in time, logs that and returns."""
        self.kill()
        try:
            async with asyncio.timeout(self._end_timeout_s):
                await self._process.wait()
        except TimeoutError:
            _log.error("the process %s was killed and has not ended", self.pid)

    async def first_answer(self) -> tuple[int, bytes]:
        """Awaits the answer that some processes send at their start, without a command. Raises as `ask` does."""
        return await self._exchange(b"", self._timeout_s)

    async def ask(self, content: bytes, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Sends a command and returns the status and the content of the answer.

        The status is what the child says, such as `answering.DONE`; `ask` does not check it. `timeout_s` replaces the
        usual limit for this answer. Raises ChildFailed if the answer does not come in time, and ChildEnded if the
        process has ended.
        """
        command = protocol.LENGTH.pack(len(content)) + content
        return await self._exchange(command, self._timeout_s if timeout_s is None else timeout_s)

    async def _exchange(self, command: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Sends `command` and returns the status and the content of the answer. Raises as `ask` does.

        It kills the process if no answer comes. It also does so if the task is cancelled, because the answer to this
        command would be taken for the answer to the next one.
        """
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
