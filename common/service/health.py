"""grpc.health.v1 of a server that names its services beforehand."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import Overloaded, RequestCancelled
from common.peer_text import peer_text
from common.rpc.errors import abort_with
from common.rpc.requests import Context

_Response = health_pb2.HealthCheckResponse
_MAX_WATCHES_PER_HOST = 1024
_WRITE_TIMEOUT_S = 10.0


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Event loop only. A watcher that reads nothing keeps neither `set` nor another watcher waiting, and is left.

    One host may watch so often that all clients behind it can, and not so often that nobody else can: what is more is
    RESOURCE_EXHAUSTED.

    (That of grpcio-health-checking holds a lock while it writes, on which every later change of the status waits.)
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._num_watches: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def set(self, service: str, *, is_serving: bool) -> None:
        self._statuses[service] = _Response.SERVING if is_serving else _Response.NOT_SERVING
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            known = ", ".join(name for name in self._statuses if name)
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"{peer_text(request.service, 128)!r} is not here, {known} is"
            )
        return _Response(status=self._statuses[request.service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        host = str(context.peer()).rpartition(":")[0]
        if self._num_watches[host] >= _MAX_WATCHES_PER_HOST:
            await abort_with(context, Overloaded(f"{_MAX_WATCHES_PER_HOST} watches of this host are open"))
        self._num_watches[host] += 1
        try:
            await self._write_changes(request.service, context)
        except TimeoutError:
            await abort_with(context, RequestCancelled("the watcher reads nothing"))
        finally:
            self._num_watches[host] -= 1
            if not self._num_watches[host]:
                del self._num_watches[host]

    async def _write_changes(self, service: str, context: Context) -> NoReturn:
        """Raises TimeoutError when a change is not taken."""
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(service, _Response.SERVICE_UNKNOWN)
            if status != sent:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await context.write(_Response(status=status))
                sent = status
            await changed.wait()
