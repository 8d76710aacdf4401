"""The service's side of a protocol in which it sends commands to a child process, one at a time, over a socket.

The child is killed if it does not answer in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

import structlog

from common.host.child_process import Child
from common.host.link import Link, start_linked

_END_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.005

_log = structlog.get_logger(__name__)


class ChildFailed(Exception):
    """The child process did not start, did not answer in time, or has ended.

    `returncode` is its exit status. It is None if the process did not start, or was killed and is stuck in the kernel.
    """

    def __init__(self, message: str, returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


class ChildEnded(ChildFailed):
    """The child process had ended before the command, or ended while carrying it out."""


class AskedProcess:
    """A child process that answers commands. Its own side of the protocol is `common.host.answering`.

    Use it on the event loop only, from one task at a time.
    """

    def __init__(self, process: Child, link: Link, timeout_s: float, end_timeout_s: float = _END_TIMEOUT_S) -> None:
        """Wraps a running process. Each answer may take `timeout_s`, and the process's end after a kill
        `end_timeout_s`.
        """
        self._process = process
        self._link = link
        self._timeout_s = timeout_s
        self._end_timeout_s = end_timeout_s
        self._is_killed = False

    @classmethod
    async def spawn(cls, module: str, *arguments: str, timeout_s: float, pass_fds: Sequence[int] = ()) -> Self:
        """Starts a child process as `start_peer` does. Raises ChildFailed if that is not possible.

        `timeout_s` limits each answer.
        """
        try:
            process, link = await start_linked(module, *arguments, pass_fds=pass_fds)
        except OSError as error:
            raise ChildFailed(f"no process can be started: {error}") from error
        return cls(process, link, timeout_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_usable(self) -> bool:
        """False if the process has ended or was killed."""
        return not (self._is_killed or self.has_ended)

    def kill(self) -> None:
        """Kills the process, without waiting for its end. A second call does nothing."""
        self._is_killed = True
        self._process.kill()
        self._link.close()

    async def close(self) -> None:
        """Kills the process and waits for its end. If it does not end in time, logs that and returns."""
        self.kill()
        try:
            async with asyncio.timeout(self._end_timeout_s):
                while not self.has_ended:  # noqa: ASYNC110 - the event loop is not told
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            _log.error("the process %s was killed and has not ended", self.pid)

    async def first_answer(self) -> tuple[int, bytes]:
        """Awaits the answer that some processes send at their start, without a command. Raises as `ask` does."""
        return await self._exchange(None, self._timeout_s)

    async def ask(self, content: bytes, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Sends a command and returns the status and the content of the answer.

        The status is what the child says, such as `answering.DONE`; `ask` does not check it. `timeout_s` replaces the
        usual limit for this answer. Raises ChildFailed if the answer does not come in time, and ChildEnded if the
        process has ended.
        """
        return await self._exchange(content, self._timeout_s if timeout_s is None else timeout_s)

    async def _exchange(self, command: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        """Sends `command`, if any, and returns the status and the content of the answer. Raises as `ask` does.

        It kills the process if no answer comes. It also does so if the task is cancelled, because the answer to this
        command would be taken for the answer to the next one.
        """
        answer, failure, kind = b"", "", ChildFailed
        try:
            async with asyncio.timeout(timeout_s):
                if command is not None:
                    self._link.send_bytes(command)
                answer = await self._link.receive_bytes()
        except TimeoutError:
            failure = f"its process did not answer within {timeout_s:g} s"
        except EOFError:
            failure, kind = "its process ended", ChildEnded
        finally:
            if not answer:
                await self.close()
        if not answer:
            end = f"status {self._process.returncode}" if self.has_ended else f"process {self.pid} does not end"
            raise kind(f"{failure} ({end})", self._process.returncode)
        return answer[0], answer[1:]
