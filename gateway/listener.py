"""The gateway's listening socket, which takes no more connections than it may."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Protocol

import structlog

from gateway.errors import unavailable
from gateway.responses import error_response

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_S = 0.5
"""asyncio logs one failed accept, and comes again a second later; meanwhile it is told that nobody waits."""
_LOG_INTERVAL_S = 10.0

_log = structlog.get_logger(__name__)


class IdleConnection(Protocol):
    def close_idle(self) -> None:
        """At once: it has no whole request."""


class Room(Enum):
    FREE = auto()
    MADE = auto()
    NONE = auto()


class OpenConnections:
    """How many connections of one listener are open, and which of them have no whole request. Event loop only."""

    def __init__(self, *, max_connections: int) -> None:
        self._max_connections = max_connections
        self._num_open = 0
        self._idle: dict[IdleConnection, None] = {}  # the one that is so for longest first
        self._num_idle_closed = self._num_refused = 0
        self._told_s = float("-inf")

    def is_idle(self, connection: IdleConnection) -> None:
        self._idle.setdefault(connection)

    def is_not_idle(self, connection: IdleConnection) -> None:
        """It has a whole request, or is closed."""
        self._idle.pop(connection, None)

    def add(self) -> Room:
        """A connection, unless there is no room for it. Where there are too many, the longest idle one goes."""
        room = Room.FREE
        if self._num_open >= self._max_connections:
            room = self._make_room()
            self._tell()
        self._num_open += room is not Room.NONE
        return room

    def remove(self) -> None:
        self._num_open -= 1

    def _make_room(self) -> Room:
        oldest = next(iter(self._idle), None)
        if oldest is None:
            self._num_refused += 1
            return Room.NONE
        del self._idle[oldest]
        oldest.close_idle()
        self._num_idle_closed += 1
        return Room.MADE

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s < self._told_s + _LOG_INTERVAL_S:
            return
        self._told_s = now_s
        _log.warning(
            "connections_full",
            max_connections=self._max_connections,
            num_idle_closed=self._num_idle_closed,
            num_refused=self._num_refused,
        )


class BoundedListener(socket.socket):
    """A listening socket for asyncio, which accepts until it is told that nobody waits."""

    def __init__(self, listener: socket.socket, *, connections: OpenConnections, is_tls: bool) -> None:
        """`listener` is no longer one."""
        family, kind, protocol = listener.family, listener.type, listener.proto
        super().__init__(family, kind, protocol, fileno=listener.detach())
        self._connections = connections
        self._refusal = b"" if is_tls else _refusal()
        self._exhausted_until_s = 0.0
        self._waits_for_room = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self._waits_for_room or time.monotonic() < self._exhausted_until_s:
            self._waits_for_room = False
            raise BlockingIOError
        try:
            descriptor, address = self._accept()  # type: ignore[attr-defined]  # as socket.accept does
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._exhausted_until_s = time.monotonic() + _EXHAUSTED_S
            raise
        match self._connections.add():
            case Room.NONE:
                self._refuse(socket.socket(fileno=descriptor))
                raise BlockingIOError
            case Room.MADE:
                self._waits_for_room = True  # what was closed is gone in the event loop's next round
        connection = _Connection(self.family, self.type, self.proto, fileno=descriptor)
        connection.on_close = self._connections.remove
        return connection, address

    def _refuse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(self._refusal)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(64 << 10)  # what came is read: a connection that closes over it takes its answer back


class _Connection(socket.socket):
    """Tells when it is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None


def _refusal() -> bytes:
    """What whoever finds no room is told, whatever it asks."""
    answer = error_response(unavailable("too many connections are open"))
    lines = [b"HTTP/1.1 503 Service Unavailable", b"connection: close"]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(answer.body)])
