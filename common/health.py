"""grpc.health.v1 of a server that names its services beforehand."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc_requests import Context

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Event loop only. A watcher that reads nothing keeps neither `set` nor another watcher waiting.

    (That of grpcio-health-checking holds a lock while it writes, on which every later change of the status waits.)
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()

    def set(self, service: str, *, is_serving: bool) -> None:
        self._statuses[service] = _Response.SERVING if is_serving else _Response.NOT_SERVING
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Response(status=self._statuses[request.service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _Response.SERVICE_UNKNOWN)
            if status != sent:
                await context.write(_Response(status=status))
                sent = status
            await changed.wait()
