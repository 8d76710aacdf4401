"""Starts the child process that runs NIXL for a service, and sends it commands."""

from __future__ import annotations

from collections.abc import Awaitable

import numpy as np
from numpy.typing import NDArray

from common.host.answering import DONE
from common.host.asked_process import AskedProcess, ChildFailed
from common.host.child_process import Child
from common.host.link import Link
from common.nixl import transfer_process as protocol


class NixlError(Exception):
    """NIXL is not installed, its process did not start, or a command to the process failed.

    The process has been killed. If its `has_ended` is true, it writes nothing any more. Otherwise it is stuck in the
    kernel, and the memory that it writes into must never be reused.
    """


class TransferProcess(AskedProcess):
    """A child process that runs NIXL, as its service uses it.

    A command that fails raises NixlError, and so does every command after it.
    """

    def __init__(self, process: Child, link: Link, timeout_s: float, **end: float) -> None:
        """Used by `started`, which callers should use instead. The arguments are those of AskedProcess; `end` may only
        hold `end_timeout_s`.
        """
        super().__init__(process, link, timeout_s, **end)
        self.address = 0
        """The address of the memory in the child process."""
        self.metadata = b""
        """The bytes that another service's NIXL process needs to connect and read the memory."""

    @classmethod
    async def started(cls, file: int, *, timeout_s: float) -> TransferProcess:
        """Starts the process and returns it when it is ready: it has mapped the memory of the descriptor `file`, and
        registered it with NIXL.

        The start, and each answer to a later command, may take `timeout_s`. Raises NixlError.
        """
        arguments = (str(file), str(2 * timeout_s))
        try:
            self = await cls.spawn(protocol.__name__, *arguments, timeout_s=timeout_s, pass_fds=(file,))
        except ChildFailed as error:
            raise NixlError(f"NIXL: {error}") from error
        answer = await self._done(self.first_answer())
        (self.address,) = protocol.START.unpack_from(answer)
        self.metadata = answer[protocol.START.size :]
        return self

    async def connect(self, metadata: bytes) -> None:
        """Makes the NIXL process with this metadata the peer of later reads."""
        await self._ask(protocol.CONNECT, metadata)

    async def read(self, ranges: NDArray[np.uint64], start: int) -> None:
        """Copies ranges of the peer's memory into the own registered memory, one after the other, from byte `start` on.

        `ranges` is [N, 2]: (address in the peer's process, number of bytes).
        """
        await self._ask(protocol.READ, protocol.START.pack(start) + ranges.tobytes())

    async def serve(self, interval_s: float) -> None:
        """Makes the process poll NIXL at this interval, so that peers' reads of the memory make progress.

        Network hardware may serve them alone; other transports need the polling.
        """
        await self._ask(protocol.SERVE, protocol.INTERVAL.pack(interval_s))

    async def _ask(self, kind: int, content: bytes) -> None:
        await self._done(self.ask(bytes([kind]) + content))

    async def _done(self, answer: Awaitable[tuple[int, bytes]]) -> bytes:
        """Awaits an answer and returns its content. If it reports a failure, ends the process and raises NixlError."""
        try:
            status, content = await answer
        except ChildFailed as error:
            raise NixlError(f"NIXL: {error}") from error
        if status != DONE:
            await self.close()
            raise NixlError(f"NIXL: {content.decode(errors='replace')}")
        return content
