"""uvicorn's HTTP/1.1 connection, with a bound on every wait for the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from gateway.limits import HttpLimits


def bounded_connections(limits: HttpLimits) -> type[H11Protocol]:
    """The protocol class that uvicorn makes one of for each connection."""

    class BoundedConnection(_BoundedConnection):
        http_limits = limits

    return BoundedConnection


class _BoundedConnection(H11Protocol):
    """Aborted when a request's head takes too long, or when the client does not take what was written.

    (uvicorn bounds only the wait between two requests.)
    """

    http_limits: HttpLimits

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_alarm = _Alarm(self.loop)
        self._stall_alarm = _Alarm(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_alarm.stop()
        self._stall_alarm.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._await_head()
        super().data_received(data)
        self._see_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._see_head()  # of a request that was sent on behind this one

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_alarm.set(self.http_limits.client_stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stall_alarm.stop()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Closing waits for what was written to be taken; not for ever."""
        super().timeout_keep_alive_handler()
        self._stall_alarm.set(self.http_limits.client_stall_timeout_s, self.transport.abort)

    def _await_head(self) -> None:
        """Also of the rest of a body that was refused: it is read, and nobody waits for it long."""
        if not self._head_alarm.is_set and not self._has_request:
            self._head_alarm.set(self.http_limits.head_timeout_s, self.transport.abort)

    def _see_head(self) -> None:
        if self._has_request:
            self._head_alarm.stop()

    @property
    def _has_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        return cycle is not None and not cycle.response_complete


class _Alarm:
    """At most one call to come."""

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
