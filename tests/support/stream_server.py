"""A TCP server on loopback whose end leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

BOUND_S = 60.0

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class StreamServer:
    """Calls `serve` for each connection, and closes the connection after it. Use it on one event loop.

    `asyncio.start_server` does not say which connections it has just accepted, so whoever closes it may leave some.
    """

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self._connections: set[asyncio.Task[None]] = set()
        self._loop.add_reader(self._listening, self._accept)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):  # the peer has left already
            connection, _ = self._listening.accept()
            task = self._loop.create_task(self._run(connection))
            self._connections.add(task)
            task.add_done_callback(partial(self._over, connection))

    async def _run(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            await self._serve(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _over(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        connection.close()  # of a task that was cancelled before it began

    async def close(self) -> None:
        """Accepts no more connections and cancels those that are open."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(tuple(self._connections), timeout=BOUND_S)
