"""A service's side of its NIXL process."""

from __future__ import annotations

from asyncio.subprocess import Process
from collections.abc import Awaitable

import numpy as np
from numpy.typing import NDArray

from common.host.answering import DONE
from common.host.asked_process import AskedProcess, ChildFailed
from common.nixl import transfer_process as protocol


class NixlError(Exception):
    """NIXL is not installed, or a call of it failed. The process has ended and writes nothing any more, or it is stuck
    in the kernel; then nobody may ever reuse the memory that it writes into.
    """


class TransferProcess(AskedProcess):
    """A call raises NixlError when it fails, and every call after it."""

    def __init__(self, process: Process, timeout_s: float, **end: float) -> None:
        """The process is not ready yet: see `started`."""
        super().__init__(process, timeout_s, **end)
        self.address = 0
        """The memory's address in the process."""
        self.metadata = b""
        """What another service's process needs to read the memory."""

    @classmethod
    async def started(cls, file: int, *, timeout_s: float) -> TransferProcess:
        """Start the process over the memory `file`. The start, and each later answer, takes at most `timeout_s`. Raises
        NixlError.
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
        """Use this peer's memory for later reads."""
        await self._ask(protocol.CONNECT, metadata)

    async def read(self, ranges: NDArray[np.uint64], start: int) -> None:
        """Copy the peer's `ranges`, [N, 2] (address, bytes), one after the other into the memory from `start` on."""
        await self._ask(protocol.READ, protocol.START.pack(start) + ranges.tobytes())

    async def serve(self, interval_s: float) -> None:
        """Look for peers' reads at this interval, if the network's hardware does not serve them."""
        await self._ask(protocol.SERVE, protocol.INTERVAL.pack(interval_s))

    async def _ask(self, kind: int, content: bytes) -> None:
        await self._done(self.ask(bytes([kind]) + content))

    async def _done(self, answer: Awaitable[tuple[int, bytes]]) -> bytes:
        """Returns the answer's content. A failure is the process's end."""
        try:
            status, content = await answer
        except ChildFailed as error:
            raise NixlError(f"NIXL: {error}") from error
        if status != DONE:
            await self.close()
            raise NixlError(f"NIXL: {content.decode(errors='replace')}")
        return content
