"""A connection between two processes on one machine, which carries pickled messages."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any, Self

_LEN = struct.Struct("<Q")
_MOST_UNREAD_BYTES = 1 << 18


class Link:
    """One end of a socket pair, for the event loop only. Both processes trust each other: they are one service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(_MOST_UNREAD_BYTES)

    @classmethod
    async def on(cls, end: socket.socket) -> Self:
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: object) -> None:
        """Queues a message. It is lost if the other process ends, or has ended."""
        if not self._writer.is_closing():
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._writer.write(_LEN.pack(len(data)) + data)

    async def can_send(self) -> None:
        """Waits until the other process has read most of what was sent. Raises OSError if it has ended."""
        await self._writer.drain()

    async def receive(self) -> Any:
        """Returns the next message. Raises EOFError or OSError if the other process has ended."""
        (num_bytes,) = _LEN.unpack(await self._reader.readexactly(_LEN.size))
        return pickle.loads(await self._reader.readexactly(num_bytes))

    def close(self) -> None:
        self._writer.close()
