"""A TCP proxy on loopback that can stop forwarding without closing anything. To both peers this looks like a cut
cable.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from tests.support.loop_thread import LoopThread
from tests.support.stream_server import StreamServer

CHUNK_BYTES = 65536


class BlackHoleProxy:
    """A proxy that forwards connections to `target`, in a thread of its own.

    While it is cut, it forwards nothing in either direction and opens no connection to the target. It holds everything
    back and forwards it once mended.

    One thing differs from a real cut: the proxy still accepts and acknowledges what a peer sends, as far as its buffers
    hold. So only the peers' own time-outs notice the silence, and TCP's do not.
    """

    def __init__(self) -> None:
        self.target: tuple[str, int] = ("127.0.0.1", 0)
        self._loop = LoopThread()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._server = self._loop.run(self._begin())
        self.address = self._server.address

    async def _begin(self) -> StreamServer:
        return StreamServer(self._serve)

    def cut(self) -> None:
        self._loop.call_soon(self._is_open.clear)

    def mend(self) -> None:
        self._loop.call_soon(self._is_open.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._is_open.wait()
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            try:
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(reader, far_writer))
                    pumps.create_task(self._pump(far_reader, writer))
            finally:
                far_writer.close()
        except OSError:
            pass
        except BaseExceptionGroup as group:
            if group.split(OSError)[1] is not None:
                raise

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction until the reader ends. It then raises ConnectionResetError, which also ends the other
        direction: gRPC closes both at once.
        """
        while data := await reader.read(CHUNK_BYTES):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        await self._is_open.wait()
        raise ConnectionResetError

    def close(self) -> None:
        self._loop.run(self._server.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
