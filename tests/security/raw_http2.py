"""An HTTP/2 client that follows no rules: it opens streams, sends whatever it is told to, and never allows the server
to send more.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def grpc_message(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message


def headers(method: str) -> bytes:
    """Returns the headers of a call in HPACK's simplest encoding: every header is literal and none is indexed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "here",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    encoded = b""
    for name, value in fields.items():
        encoded += b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
    return encoded


class RawHttp2:
    """An HTTP/2 connection. `frames` lists all received frames as (kind, flags, stream, payload). It acknowledges
    settings and pings.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_stream = 1
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.is_closed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, address: str, *, window: int = 65535) -> RawHttp2:
        """Connects to a server. `window` is the number of bytes that the server may send on each stream, and is never
        increased.
        """
        host, _, port = address.rpartition(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        client.send(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window)))
        return client

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def open(self, method: str, message: bytes | None = None, *, ends: bool = True) -> int:
        """Opens a call, and returns its stream's number. Without a message, the call stays open and its message never
        comes.
        """
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self.send(frame(HEADERS, END_HEADERS, stream, headers(method)))
        if message is not None:
            self.send(frame(DATA, END_STREAM if ends else 0, stream, grpc_message(message)))
        return stream

    def of(self, stream: int, kind: int) -> list[bytes]:
        return [payload for each, _, number, payload in self.frames if (each, number) == (kind, stream)]

    def has_ended(self, stream: int) -> bool:
        return any(
            number == stream and (kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM))
            for kind, flags, number, _ in self.frames
        )

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        await self._reading

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                self.frames.append((kind, flags, int.from_bytes(head[5:], "big"), payload))
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self.send(frame(kind, ACK, 0, payload if kind == PING else b""))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed.set()
