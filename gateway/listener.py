"""The gateway's listening socket, with a limit on open connections."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import structlog

from common.addresses import network_of
from gateway.errors import unavailable
from gateway.sending import error_response

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_S = 0.5
"""How long `accept` reports no waiting connection after the process ran out of descriptors or memory.

Meanwhile asyncio logs one error only, and it tries again a second later.
"""
_LOG_INTERVAL_S = 10.0
_MAX_REFUSED = 64
"""Most refused connections that stay open at a time. Their descriptors are not among those of `max_connections`."""

_log = structlog.get_logger(__name__)


class ConnectionRoom(Enum):
    FREE = auto()
    MADE = auto()
    NONE = auto()


@dataclass(slots=True)
class _Open:
    """An open connection. `close` ends it at once."""

    client: str
    close: Callable[[], None]


class OpenConnections:
    """Counts the open connections of one listener, and decides which one is closed when there is no room for a new one.

    A connection is idle while no whole request has come on it. When all places are taken, a new connection replaces an
    idle one: one that sends nothing, or, if there is none, one that is still sending its request. The client (by
    network) with the most such connections loses the one that is idle for longest. If no connection is idle, the new
    one is refused. One client has at most seven eighths of all places; beyond that its new connections replace only its
    own idle ones.

    Connections are identified by their file descriptors. Use it on the event loop only.
    """

    def __init__(self, *, max_connections: int) -> None:
        self._max_connections = max_connections
        self._max_of_one = max(1, max_connections * 7 // 8)
        self._open: dict[int, _Open] = {}
        self._num_open: Counter[str] = Counter()  # keyed by client
        self._silent, self._sending = _IdleConnections(), _IdleConnections()
        self._num_idle_closed = self._num_refused = 0
        self._told_s = float("-inf")

    def add(self, descriptor: int, client: str, *, close: Callable[[], None]) -> ConnectionRoom:
        """Adds a new connection, after closing an idle one if no place is free.

        Returns FREE if a place was free, MADE if a connection was closed for it, and NONE if there is no room. With
        NONE the connection is not added, and the caller must refuse it.
        """
        room = self._make_room(client)
        if room is not ConnectionRoom.NONE:
            self._open[descriptor] = _Open(client, close)
            self._num_open[client] += 1
        return room

    def remove(self, descriptor: int) -> None:
        """Forgets a connection. Call it when the connection was closed."""
        self.is_not_idle(descriptor)
        if (connection := self._open.pop(descriptor, None)) is None:  # another connection has taken its place already
            return
        self._num_open[connection.client] -= 1
        if not self._num_open[connection.client]:
            del self._num_open[connection.client]

    def is_idle(self, descriptor: int, *, is_sending: bool = False, close: Callable[[], None] | None = None) -> None:
        """Records that a connection is idle. `is_sending` says whether part of a request has come at a permitted rate.

        `close`, if given, replaces the function that closes the connection.
        """
        if (connection := self._open.get(descriptor)) is not None:  # None: it is being closed
            connection.close = close or connection.close
            other, own = (self._silent, self._sending) if is_sending else (self._sending, self._silent)
            other.discard(connection.client, descriptor)
            own.add(connection.client, descriptor)

    def is_not_idle(self, descriptor: int) -> None:
        """Records that a connection is not idle, because a whole request has come on it."""
        if (connection := self._open.get(descriptor)) is not None:
            self._silent.discard(connection.client, descriptor)
            self._sending.discard(connection.client, descriptor)

    def _make_room(self, client: str) -> ConnectionRoom:
        has_all_it_may = self._num_open[client] >= self._max_of_one
        if len(self._open) < self._max_connections and not has_all_it_may:
            return ConnectionRoom.FREE
        self._tell()
        for idle in (self._silent, self._sending):
            longest = idle.longest_of(client) if has_all_it_may else idle.longest_of_most()
            if longest is not None:
                close = self._open[longest].close
                self.remove(longest)
                close()
                self._num_idle_closed += 1
                return ConnectionRoom.MADE
        self._num_refused += 1
        return ConnectionRoom.NONE

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


class _IdleConnections:
    """The idle connections of each client, ordered by how long they are idle. Finds the client that has the most.

    Every operation takes constant time.
    """

    def __init__(self) -> None:
        # Each client's connections, the one that is idle for longest first.
        self._by_client: dict[str, dict[int, None]] = {}
        # The clients, keyed by their number of idle connections.
        self._clients: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._most = 0

    def longest_of(self, client: str) -> int | None:
        return next(iter(self._by_client.get(client, ())), None)

    def longest_of_most(self) -> int | None:
        for client in self._clients.get(self._most, ()):
            return self.longest_of(client)
        return None

    def add(self, client: str, descriptor: int) -> None:
        own = self._by_client.setdefault(client, {})
        if descriptor not in own:
            own[descriptor] = None
            self._move(client, len(own) - 1, len(own))

    def discard(self, client: str, descriptor: int) -> None:
        own = self._by_client.get(client, {})
        if descriptor in own:
            del own[descriptor]
            self._move(client, len(own) + 1, len(own))

    def _move(self, client: str, before: int, after: int) -> None:
        self._clients[before].pop(client, None)
        if after:
            self._clients[after][client] = None
        else:
            del self._by_client[client]
        if not self._clients[before]:
            del self._clients[before]
        if after > self._most or self._most not in self._clients:
            self._most = after


class BoundedListener(socket.socket):
    """A listening socket for asyncio that limits open connections.

    `accept` raises BlockingIOError, which stops asyncio's loop of accepts, if no connection waits, after it refused or
    replaced one, and for a while after the process ran out of descriptors or memory.
    """

    def __init__(self, listener: socket.socket, *, connections: OpenConnections, is_tls: bool, linger_s: float) -> None:
        """Takes over the descriptor of `listener`, which cannot be used after that. Refused connections stay open for
        reading for up to `linger_s`.
        """
        family, kind, protocol = listener.family, listener.type, listener.proto
        super().__init__(family, kind, protocol, fileno=listener.detach())
        self._connections = connections
        self._is_tls = is_tls
        self._refused = _RefusedConnections(b"" if is_tls else _refusal(), linger_s=linger_s)
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
        match self._connections.add(descriptor, client, close=connection.end):
            case ConnectionRoom.NONE:
                self._refused.add(connection)
                raise BlockingIOError
            case ConnectionRoom.MADE:
                self._waits_for_room = True  # the event loop closes the replaced connection in its next iteration
        if self._is_tls:
            self._connections.is_idle(
                descriptor
            )  # silent until the handshake; without TLS, the request may have come already
        connection.on_close = partial(self._connections.remove, descriptor)
        return connection, address

    def close(self) -> None:
        super().close()
        self._refused.close()


class _RefusedConnections:
    """Answers refused connections, and drops what comes on them until their clients close them.

    Otherwise the system would discard the answer when the rest of a request comes. A connection is closed after
    `linger_s` at the latest, and earlier if it is the oldest of more than _MAX_REFUSED. Use it on the event loop only.
    """

    def __init__(self, answer: bytes, *, linger_s: float) -> None:
        self._answer = answer
        self._linger_s = linger_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[socket.socket, asyncio.TimerHandle] = {}  # with the timers that close them, the oldest first

    def add(self, connection: socket.socket) -> None:
        if len(self._open) == _MAX_REFUSED:
            self._close(next(iter(self._open)))
        self._open[connection] = self._loop.call_later(self._linger_s, self._close, connection)
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read, connection)
        try:
            connection.send(self._answer)
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # the client has left
            self._close(connection)

    def close(self) -> None:
        for connection in tuple(self._open):
            self._close(connection)

    def _read(self, connection: socket.socket) -> None:
        try:
            has_more = bool(connection.recv(64 << 10))
        except BlockingIOError:
            return
        except OSError:
            has_more = False
        if not has_more:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._open.pop(connection).cancel()
        self._loop.remove_reader(connection)
        connection.close()


class _Connection(socket.socket):
    """A socket that calls `on_close` after it was closed."""

    on_close: Callable[[], None] | None = None

    def end(self) -> None:
        """Shuts the connection down, so that its reader sees the end of the stream, even during a TLS handshake."""
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None


def _refusal() -> bytes:
    """Returns the HTTP answer to a connection for which there is no room."""
    answer = error_response(unavailable("too many connections are open"))
    lines = [b"HTTP/1.1 503 Service Unavailable", b"connection: close"]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(answer.body)])
