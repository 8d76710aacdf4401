"""A service's side of its transfer process: asked one thing at a time, and killed where it does not answer."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from common.nixl import transfer_process as protocol

_END_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class NixlError(Exception):
    """NIXL is not installed, or what was asked of it failed. The process has ended: it writes nothing any more. Or it
    does not end, stuck in the kernel: what it may write into is to be nobody else's, ever.
    """


class TransferProcess:
    """Event loop only, one task at a time. What it is asked raises NixlError when it fails, always from then on."""

    def __init__(self, process: Process, timeout_s: float, end_timeout_s: float = _END_TIMEOUT_S) -> None:
        """Not yet ready: see `started`. Once killed it has `end_timeout_s` to end."""
        self._process = process
        self._timeout_s = timeout_s
        self._end_timeout_s = end_timeout_s
        self._is_killed = False
        self.address = 0
        """Of the memory, in the process."""
        self.metadata = b""
        """What the process of another service needs to read there."""

    @classmethod
    async def started(cls, file: int, *, timeout_s: float) -> TransferProcess:
        """Over the memory `file`. It, and each answer, takes at most `timeout_s`. Raises NixlError."""
        arguments = (sys.executable, "-m", protocol.__name__, str(file), str(2 * timeout_s))
        try:
            process = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, pass_fds=(file,))
        except OSError as error:
            raise NixlError(f"no process for NIXL can be started: {error}") from error
        self = cls(process, timeout_s)
        answer = await self._exchange(b"")
        (self.address,) = protocol.START.unpack_from(answer)
        self.metadata = answer[protocol.START.size :]
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def is_usable(self) -> bool:
        return not (self._is_killed or self.has_ended)

    async def connect(self, metadata: bytes) -> None:
        """The peer whose memory is read from now on."""
        await self._ask(protocol.CONNECT, metadata)

    async def read(self, ranges: NDArray[np.uint64], start: int) -> None:
        """Put the peer's `ranges`, [N, 2] (address, bytes), one after the other into the memory, from `start` on."""
        await self._ask(protocol.READ, protocol.START.pack(start) + ranges.tobytes())

    async def serve(self, interval_s: float) -> None:
        """Look so often for what peers want of the memory, where the network's hardware does not."""
        await self._ask(protocol.SERVE, protocol.INTERVAL.pack(interval_s))

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
            _log.error("the process %s, which NIXL lives in, was killed and has not ended", self.pid)

    async def _ask(self, kind: int, content: bytes) -> None:
        await self._exchange(protocol.LENGTH.pack(1 + len(content)) + bytes([kind]) + content)

    async def _exchange(self, command: bytes) -> bytes:
        """The content of the answer. A task that is cancelled here leaves an answer that nobody takes: it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        is_done = False
        try:
            async with asyncio.timeout(self._timeout_s):
                self._process.stdin.write(command)
                await self._process.stdin.drain()
                length = await self._process.stdout.readexactly(protocol.LENGTH.size)
                answer = await self._process.stdout.readexactly(protocol.LENGTH.unpack(length)[0])
            is_done, failure = answer[0] == protocol.DONE, answer[1:].decode(errors="replace")
        except TimeoutError:
            failure = f"its process did not answer within {self._timeout_s} s"
        except (OSError, asyncio.IncompleteReadError):
            failure = "its process ended"
        finally:
            if not is_done:
                await self.close()
        if not is_done:
            end = f"status {self._process.returncode}" if self.has_ended else f"process {self.pid} does not end"
            raise NixlError(f"NIXL: {failure} ({end})")
        return answer[1:]
