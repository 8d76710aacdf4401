"""A service's side of its transfer process."""

from __future__ import annotations

from asyncio.subprocess import Process
from collections.abc import Awaitable

import numpy as np
from numpy.typing import NDArray

from common.host.answering import DONE
from common.host.asked_process import AskedProcess, ChildFailed
from common.nixl import transfer_process as protocol


class NixlError(Exception):
    """NIXL is not installed, or what was asked of it failed. The process has ended: it writes nothing any more. Or it
    does not end, stuck in the kernel: what it may write into is to be nobody else's, ever.
    """


class TransferProcess(AskedProcess):
    """What it is asked raises NixlError when it fails, always from then on."""

    def __init__(self, process: Process, timeout_s: float, **end: float) -> None:
        """Not yet ready: see `started`."""
        super().__init__(process, timeout_s, **end)
        self.address = 0
        """Of the memory, in the process."""
        self.metadata = b""
        """What the process of another service needs to read there."""

    @classmethod
    async def started(cls, file: int, *, timeout_s: float) -> TransferProcess:
        """Over the memory `file`. It, and each answer, takes at most `timeout_s`. Raises NixlError."""
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
        """The peer whose memory is read from now on."""
        await self._ask(protocol.CONNECT, metadata)

    async def read(self, ranges: NDArray[np.uint64], start: int) -> None:
        """Put the peer's `ranges`, [N, 2] (address, bytes), one after the other into the memory, from `start` on."""
        await self._ask(protocol.READ, protocol.START.pack(start) + ranges.tobytes())

    async def serve(self, interval_s: float) -> None:
        """Look so often for what peers want of the memory, where the network's hardware does not."""
        await self._ask(protocol.SERVE, protocol.INTERVAL.pack(interval_s))

    async def _ask(self, kind: int, content: bytes) -> None:
        await self._done(self.ask(bytes([kind]) + content))

    async def _done(self, answer: Awaitable[tuple[int, bytes]]) -> bytes:
        """Its content. Any failure is the process's end."""
        try:
            status, content = await answer
        except ChildFailed as error:
            raise NixlError(f"NIXL: {error}") from error
        if status != DONE:
            await self.close()
            raise NixlError(f"NIXL: {content.decode(errors='replace')}")
        return content
