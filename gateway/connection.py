"""uvicorn's HTTP/1.1 connection with time limits for a request's head, for the rest of a body after its answer, and for
a client that does not read. It refuses ambiguous HTTP, which servers and proxies may read in different ways, before it
becomes a request. (post_endpoint.py limits the wait for a body.)
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from gateway.errors import ApiError
from gateway.limits import HttpLimits
from gateway.listener import OpenConnections
from gateway.sending import SLICE_BYTES, error_response

_VERSIONS = (b"1.0", b"1.1")
_AUTHORITY = re.compile(rb"(?P<host>[A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_ABSOLUTE = re.compile(rb"https?://(?P<authority>[^/?#]*)(?P<rest>[^#]*)", re.IGNORECASE)


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to malformed HTTP. `reason` goes to the log and quotes nothing that the client sent."""

    error: ApiError
    reason: str


class _StrictConnection(h11.Connection):
    """h11's connection with stricter rules. `refusal` says why the last input was refused; None if it was not.

    It also accepts request targets in absolute form (http://HOST/PATH).
    """

    refusal: Refusal | None = None

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:  # the exception's message may quote the client's line
            self.refusal = Refusal(ApiError(400, f"this is no HTTP/1.1: {error}"[:256]), str(error).partition(":")[0])
            raise
        if not isinstance(event, h11.Request):
            return event
        try:
            return _checked(event)
        except ApiError as error:
            self.refusal = Refusal(error, str(error))
            raise h11.RemoteProtocolError(str(error)) from None


def _checked(request: h11.Request) -> h11.Request:
    """Checks a request's head and returns it with the target as a path. Raises ApiError."""
    if request.http_version not in _VERSIONS:
        raise ApiError(505, "this version of HTTP is not spoken here, HTTP/1.1 is")
    given = {name for name, _ in request.headers}
    if b"transfer-encoding" in given and b"content-length" in given:
        raise ApiError(400, "content-length and transfer-encoding exclude each other")
    if b"transfer-encoding" in given and request.http_version == b"1.0":
        raise ApiError(400, "HTTP/1.0 has no transfer-encoding")
    for name, value in request.headers:
        if name == b"host":
            _check_authority("host", value)
    if request.target.startswith(b"/") or (request.method, request.target) == (b"OPTIONS", b"*"):
        return request
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        raise ApiError(400, "the request's target is neither a path nor http://HOST/PATH")
    _check_authority("the target's host", absolute["authority"])
    rest = absolute["rest"]
    return h11.Request(
        method=request.method,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        headers=[*((n, v) for n, v in request.headers if n != b"host"), (b"host", absolute["authority"])],
        http_version=request.http_version,
    )


def _check_authority(what: str, value: bytes) -> None:
    match = _AUTHORITY.fullmatch(value)
    if match is None or int(match["port"] or 0) > 65535:
        raise ApiError(400, f"{what}: is not HOST or HOST:PORT")


def bounded_connections(limits: HttpLimits, connections: OpenConnections) -> type[H11Protocol]:
    """Returns the protocol class that uvicorn instantiates for each connection."""

    class LimitedConnection(_BoundedConnection):
        http_limits = limits
        open_connections = connections

    return LimitedConnection


class _BoundedConnection(H11Protocol):
    """An HTTP/1.1 connection that is aborted when its client is too slow or sends too much.

    It is aborted when a request's head takes too long, when the client reads nothing of the written data for too long,
    or when the client sends more than `max_head_bytes` ahead while a request is open. (uvicorn limits only the wait
    between two requests.) A connection that is closed while its client still sends a request stays open for reading,
    for up to `head_timeout_s`, and drops what comes: the system would discard the answer otherwise.

    The limit for a client that does not read also holds while the connection is closing. Over TLS, the last 64 KiB are
    in asyncio's TLS layer, where this class does not see them; asyncio itself limits how long that layer takes to
    close.
    """

    http_limits: HttpLimits
    open_connections: OpenConnections
    conn: _StrictConnection
    _descriptor = -1
    _is_lingering = False
    _paced_until_s = 0.0
    """The time until which the received bytes of the next request are enough for the slowest permitted rate."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _StrictConnection(h11.SERVER, self.http_limits.max_head_bytes)
        self._head_alarm = _Alarm(self.loop)
        self._pace_alarm = _Alarm(self.loop)
        self._stall_alarm = _Alarm(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_TransportThatLingers(transport, self._linger))  # type: ignore[arg-type]
        transport.set_write_buffer_limits(high=1)  # pauses writing as long as any written data is not sent
        # By default the kernel reports free space only after a third of its buffer was read; a slow reader would seem
        # to read nothing.
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SLICE_BYTES)
        self._descriptor = connection.fileno()
        self._await_head()
        self.open_connections.is_idle(self._descriptor, close=transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._descriptor = -1  # the kernel soon gives the number to another connection
        self._head_alarm.stop()
        self._pace_alarm.stop()
        self._stall_alarm.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        self._await_head()
        self._pace(len(data))
        super().data_received(data)
        self._see_head()
        if self._has_request and not self.cycle.more_body:
            self._read_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._paced_until_s = 0.0
        self._see_head()  # the client may have sent part of its next request already

    def shutdown(self) -> None:
        if self._is_lingering:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taking()

    def resume_writing(self) -> None:
        self._stall_alarm.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers malformed HTTP or a head that is too large, and closes the connection.

        If a request is still open on it, that request is treated as if its client had left.
        """
        if self._has_request:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        refusal = self.conn.refusal
        assert refusal is not None, msg
        _log.info("http_refused", status=refusal.error.status, error=refusal.reason)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(refusal.error)
            headers = [*answer.raw_headers, CLOSE_HEADER]
            reason = HTTPStatus(answer.status_code).phrase.encode()
            head = h11.Response(status_code=answer.status_code, headers=headers, reason=reason)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _linger(self, transport: asyncio.Transport) -> bool:
        """Called when `transport` should be closed. Returns whether it stays open until the client closes it, or until
        `head_timeout_s` has passed, because the client still sends a request.
        """
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR) or transport.is_closing():
            return False
        if not self._is_lingering:
            self._is_lingering = True
            if transport.can_write_eof():
                with suppress(OSError):  # the client has read the answer and left
                    transport.write_eof()
            self.flow.resume_reading()
            self._head_alarm.set(self.http_limits.head_timeout_s, transport.abort)
        return True

    def _watch_taking(self) -> None:
        num_untaken = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < num_untaken:
                self._watch_taking()
            else:
                self.transport.abort()

        self._stall_alarm.set(self.http_limits.client_stall_timeout_s, look)

    def _read_on(self) -> None:
        """Goes on reading after a whole request, where uvicorn would pause, because only a read shows that the client
        has left.
        """
        ahead, _ = self.conn.trailing_data
        if len(ahead) > self.http_limits.max_head_bytes:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _await_head(self) -> None:
        """Starts the time limit for the head of the next request, unless a request is open or the limit is running.

        If a request was answered before its whole body came, the rest of the body must come within this limit too.
        """
        if not self._head_alarm.is_set and not self._has_request:
            self._head_alarm.set(self.http_limits.head_timeout_s, self.transport.abort)

    def _pace(self, num_bytes: int) -> None:
        """Extends, for `num_bytes` more bytes, the time until which the received bytes are enough for the slowest
        permitted rate.

        The rate counts from the request's first byte. A request that fell below it stays too slow until the missing
        bytes have come too. Bytes that come early count for at most `body_window_s`. A connection whose request is too
        slow counts as sending nothing (see OpenConnections).
        """
        limits, now_s = self.http_limits, self.loop.time()
        paced_until_s = (self._paced_until_s or now_s) + num_bytes / limits.min_body_rate
        self._paced_until_s = min(paced_until_s, now_s + limits.body_window_s)

    def _see_head(self) -> None:
        if self._is_lingering:
            return
        if self._has_request:
            self._head_alarm.stop()
        if self._has_request and not self.cycle.more_body:
            self.open_connections.is_not_idle(self._descriptor)
            return
        paced_s = self._paced_until_s - self.loop.time()
        self.open_connections.is_idle(self._descriptor, is_sending=paced_s > 0)
        if paced_s > 0:
            self._pace_alarm.set(paced_s, self._see_head)

    @property
    def _has_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete


class _TransportThatLingers:
    """A transport whose `close` closes it only if `linger` returns False. After `close`, `is_closing` is True."""

    def __init__(self, transport: asyncio.Transport, linger: Callable[[asyncio.Transport], bool]) -> None:
        self._transport = transport
        self._linger = linger
        self._is_closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._is_closing = True
        if not self._linger(self._transport):
            self._transport.close()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()


class _Alarm:
    """A timer on the event loop. Setting it again replaces the pending call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def set(self, delay_s: float, act: Callable[[], object]) -> None:
        self.stop()
        self._handle = self._loop.call_later(delay_s, act)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
