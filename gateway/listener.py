"""The gateway's listening socket, which takes no more connections than it may."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import structlog

from common.addresses import network_of
from common.fair_places import FairPlaces, Full
from gateway.errors import unavailable
from gateway.responses import error_response

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_S = 0.5
"""asyncio logs one failed accept, and comes again a second later; meanwhile it is told that nobody waits."""
_LOG_INTERVAL_S = 10.0

_log = structlog.get_logger(__name__)


class Room(Enum):
    FREE = auto()
    MADE = auto()
    NONE = auto()


@dataclass(slots=True)
class _Open:
    """One connection. `close` ends it at once."""

    client: str
    taken_s: float
    close: Callable[[], None]


class OpenConnections:
    """The connections of one listener, by descriptor, and which of them have no whole request. Event loop only.

    Clients, by network, share the places. Where a client finds none, an idle connection goes for its new one: the
    longest idle of the client that has most connections, be it itself or another with more than it has.
    """

    def __init__(self, *, max_connections: int) -> None:
        self._places = FairPlaces(max(1, max_connections * 8 // 9))  # and an eighth more
        self._open: dict[int, _Open] = {}
        self._idle: dict[str, dict[int, None]] = {}  # by client; the one that is so for longest first
        self._num_idle_closed = self._num_refused = 0
        self._told_s = float("-inf")

    def make_room(self, client: str) -> tuple[Room, float]:
        """For a connection, unless there is none: then it is refused. And when it took its place."""
        try:
            return Room.FREE, self._places.take(client)
        except Full:
            pass
        self._tell()
        num_held = self._places.num_held
        holder = max(self._idle, key=lambda each: (num_held(each), each == client), default=None)
        if holder is None or (holder != client and num_held(holder) <= num_held(client)):
            self._num_refused += 1
            return Room.NONE, 0.0
        longest_idle = next(iter(self._idle[holder]))
        self.is_not_idle(longest_idle)
        closed = self._open.pop(longest_idle)
        closed.close()
        self._num_idle_closed += 1
        return Room.MADE, self._places.pass_on(holder, closed.taken_s, client)

    def add(self, descriptor: int, client: str, taken_s: float, *, close: Callable[[], None]) -> None:
        """A connection that has its place."""
        self._open[descriptor] = _Open(client, taken_s, close)

    def remove(self, descriptor: int) -> None:
        """It is closed."""
        self.is_not_idle(descriptor)
        if (closed := self._open.pop(descriptor, None)) is not None:  # else its place was passed on
            self._places.give_back(closed.client, closed.taken_s)

    def is_idle(self, descriptor: int, *, close: Callable[[], None] | None = None) -> None:
        """From now on, if it was not. `close` is how it ends from now on."""
        if (connection := self._open.get(descriptor)) is not None:  # else it is being closed
            connection.close = close or connection.close
            self._idle.setdefault(connection.client, {}).setdefault(descriptor)

    def is_not_idle(self, descriptor: int) -> None:
        """It has a whole request."""
        if (connection := self._open.get(descriptor)) is None:
            return
        idle = self._idle.get(connection.client, {})
        idle.pop(descriptor, None)
        if not idle:
            self._idle.pop(connection.client, None)

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s < self._told_s + _LOG_INTERVAL_S:
            return
        self._told_s = now_s
        _log.warning(
            "connections_full",
            max_connections=self._places.num_places,
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
        self._is_tls = is_tls
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
        connection = _Connection(self.family, self.type, self.proto, fileno=descriptor)
        client = network_of(address[0])
        room, taken_s = self._connections.make_room(client)
        match room:
            case Room.NONE:
                self._refuse(connection)
                raise BlockingIOError
            case Room.MADE:
                self._waits_for_room = True  # what was closed is gone in the event loop's next round
        self._connections.add(descriptor, client, taken_s, close=connection.end)
        if self._is_tls:
            self._connections.is_idle(descriptor)  # a plain one may have sent its request already
        connection.on_close = partial(self._connections.remove, descriptor)
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

    def end(self) -> None:
        """Who reads meets the end, as during a handshake."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

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
