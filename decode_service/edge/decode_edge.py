"""The decode service's edge as `ServiceLife` starts and stops it: opening, readiness, draining and closing."""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import BatonError, Draining
from common.service.engine_thread import EnginePort
from decode_service.edge.live_requests import AllLiveRequests
from decode_service.edge.replicas import ReplicaBoard
from decode_service.handoff.transport import HandoffTransport
from decode_service.messages import Command, Drain


class DecodeEdge:
    """A ServiceEdge of the decode service: it serves clients' requests and talks to prefill replicas. For the event
    loop only.
    """

    def __init__(
        self,
        *,
        engine: EnginePort[Command],
        live_requests: AllLiveRequests,
        replicas: ReplicaBoard,
        transport: HandoffTransport,
    ) -> None:
        self._engine = engine
        self._live_requests = live_requests
        self._replicas = replicas
        self._transport = transport

    async def open(self) -> None:
        await self._transport.open()

    @property
    def is_ready(self) -> bool:
        """Whether the service can admit requests: it is not draining, and a prefill replica is ready or not needed.

        A replica is ready only if its fingerprint agrees, so an admitted request can be computed.
        """
        return self._replicas.can_serve and not self._live_requests.is_draining

    @property
    def num_open(self) -> Mapping[str, int]:
        return {"num_requests": len(self._live_requests)}

    def drain(self) -> None:
        """Stops admitting requests. The engine goes on with those it has, and is told to drain only by `end_rest`."""
        self._live_requests.drain()

    async def wait_idle(self) -> None:
        await self._live_requests.wait_idle()

    def fail_all(self, error: BatonError) -> None:
        self._live_requests.fail_all(error)

    def end_rest(self) -> None:
        self._engine.post(Drain())
        self._live_requests.fail_all(Draining("the service stopped before the request's end"))

    async def close(self) -> None:
        await self._transport.close()
