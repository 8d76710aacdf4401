"""The event loop's end of a socket pair, which carries messages between a service and its child process.

    message  | bytes: u32, most significant first | content |

`multiprocessing.connection.Connection` sends messages of less than 2 GiB in the same format. Threads that may block use
a Connection at their end.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from common.host.child_process import Child, start_peer

_LENGTH = struct.Struct("!I")
_MOST_UNREAD_BYTES = 1 << 18


class Link:
    """One end of a socket pair, for the event loop only. It is closed when the other process has ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(_MOST_UNREAD_BYTES)

    @classmethod
    async def on(cls, end: socket.socket) -> Self:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, protocol = await loop.create_unix_connection(lambda: _ClosedAtEnd(reader), sock=end)
        protocol.writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return cls(reader, protocol.writer)

    def send(self, message: object) -> None:
        """Queues a message, pickled. It is lost if the other process ends, or has ended."""
        self.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_bytes(self, message: bytes) -> None:
        """Queues a message. It is lost if the other process ends, or has ended."""
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(message)) + message)

    async def can_send(self) -> None:
        """Waits until the other process has read most of what was sent. Raises EOFError if it has ended."""
        with _eof_if_broken():
            await self._writer.drain()

    async def receive(self) -> Any:
        """Returns the next message, unpickled. Do not use it where the other process runs foreign code.

        Raises EOFError if the other process has ended.
        """
        return pickle.loads(await self.receive_bytes())

    async def receive_bytes(self) -> bytes:
        """Returns the next message. Raises EOFError if the other process has ended."""
        with _eof_if_broken():
            (num_bytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return await self._reader.readexactly(num_bytes)

    def close(self) -> None:
        self._writer.close()


@contextmanager
def _eof_if_broken() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EOFError("the other process has ended") from error


class _ClosedAtEnd(asyncio.StreamReaderProtocol):
    writer: asyncio.StreamWriter
    """The writer is kept here until the socket is closed, even if nobody refers to the Link any more."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # nobody reads what is sent any more


async def start_linked(module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> tuple[Child, Link]:
    """Starts a child as `start_peer` does. Returns the child and the link to it. Raises OSError."""
    child, end = start_peer(module, *arguments, pass_fds=pass_fds)
    try:
        return child, await Link.on(end)
    except BaseException:
        end.close()
        child.kill()
        child.wait()
        raise
