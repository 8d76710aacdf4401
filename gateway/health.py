"""Health endpoints, which tell whether the gateway would serve a request now."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from baton import AsyncClient
from baton.errors import BatonError
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from gateway.open_requests import OpenRequests
from gateway.sending import JsonResponse

_TIMEOUT_S = 2.0


class GatewayHealth:
    def __init__(self, client: AsyncClient, *, open_requests: OpenRequests, timeout_s: float = _TIMEOUT_S) -> None:
        self._client = client
        self._open_requests = open_requests
        self._timeout_s = timeout_s

    async def ready(self, _request: Request) -> Response:
        """Answers 200 if a decode service is ready. Answers 503 with the reason if none is, or if this process is
        stopping.
        """
        reason = await self._reason()
        if reason is None:
            return JsonResponse({"status": "ok"})
        return JsonResponse({"status": "unavailable", "reason": reason}, status_code=503)

    async def live(self, _request: Request) -> Response:
        """Answers 200 as long as this process runs."""
        return JsonResponse({"status": "ok"})

    async def _reason(self) -> str | None:
        if self._open_requests.is_draining:
            return "the gateway is stopping"
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._client.health(READY_SERVICE["decode"])
        except TimeoutError:
            return f"the decode service did not answer within {self._timeout_s:g} s"
        except BatonError as error:
            return f"the decode service cannot be reached: {error}"
        return None if status is HealthStatus.SERVING else "the decode service is not ready"
