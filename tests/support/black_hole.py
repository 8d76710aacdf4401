"""A TCP proxy on loopback that can stop forwarding without closing anything: to both peers, a cut between hosts."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from tests.support.loop_thread import LoopThread

CHUNK_BYTES = 65536
BOUND_S = 10.0


class BlackHoleProxy:
    """Forwards connections to `target`, in a thread of its own.

    While cut, nothing is forwarded in either direction, nor is a new connection; everything is held, and goes on when
    mended. Unlike a cut network it takes what a peer sends (as much as its buffers hold) and acknowledges it, so that
    only the peers' own time-outs see the silence, not those of TCP.
    """

    def __init__(self) -> None:
        self.target: tuple[str, int] = ("127.0.0.1", 0)
        self._loop = LoopThread()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server = self._loop.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._loop.call_soon(self._is_open.clear)

    def mend(self) -> None:
        self._loop.call_soon(self._is_open.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        try:
            await self._is_open.wait()
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            try:
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(reader, far_writer))
                    pumps.create_task(self._pump(far_reader, writer))
            finally:
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass
        except BaseExceptionGroup as group:
            if group.split((OSError, asyncio.CancelledError))[1] is not None:
                raise
        finally:
            self._pumps.discard(task)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ends by ConnectionResetError, which ends the other direction too: gRPC closes both at once."""
        while data := await reader.read(CHUNK_BYTES):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        await self._is_open.wait()
        raise ConnectionResetError

    async def _end(self) -> None:
        self._server.close()
        for pump in tuple(self._pumps):
            pump.cancel()
        if self._pumps:
            await asyncio.wait(tuple(self._pumps), timeout=BOUND_S)

    def close(self) -> None:
        self._loop.run(self._end())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
