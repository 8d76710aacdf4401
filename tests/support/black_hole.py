"""A TCP proxy on loopback that can stop forwarding without closing anything. To both peers this looks like a cut
cable.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from tests.support.loop_thread import LoopThread

CHUNK_BYTES = 65536
BOUND_S = 60.0


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
        self._begun: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server = self._loop.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._loop.call_soon(self._is_open.clear)

    def mend(self) -> None:
        self._loop.call_soon(self._is_open.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._note_begun()
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
            writer.close()

    def _note_begun(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction until the reader ends. It then raises ConnectionResetError, which also ends the other
        direction: gRPC closes both at once.
        """
        self._note_begun()
        while data := await reader.read(CHUNK_BYTES):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        await self._is_open.wait()
        raise ConnectionResetError

    async def _end(self) -> None:
        async with asyncio.timeout(BOUND_S):
            while begins := asyncio.all_tasks() - self._begun - {asyncio.current_task()}:  # connections just come
                await asyncio.wait(begins, timeout=0.001)
            self._server.close()
            for task in self._begun:
                task.cancel()
            await asyncio.gather(*self._begun, return_exceptions=True)

    def close(self) -> None:
        self._loop.run(self._end())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
