"""A connection between two processes on one machine, which carries pickled messages, and its silence."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Self

SAYS_EVERY_S = 1.0
"""Either side says something at least this often."""

_LONGEST_LOOK_S = 1.0
_LEAST_LIMIT_S = 4 * SAYS_EVERY_S


class Silence:
    """The time since the other side was heard, in seconds. At first it is negative: the other side has `patience_s`.

    Each look adds at most one second. So nobody is taken for lost when the machine was suspended.
    """

    def __init__(self, *, patience_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._silent_s = -patience_s

    def heard(self) -> None:
        self._silent_s = 0.0

    def look(self) -> float:
        """Returns the time of silence. Call it often."""
        now_s = self._clock()
        self._silent_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        return self._silent_s


def longest_silence_s(stall_timeout_s: float) -> float:
    """Returns after how much silence a process is taken for lost: `stall_timeout_s`, if that is enough to tell."""
    return max(stall_timeout_s, _LEAST_LIMIT_S)


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
