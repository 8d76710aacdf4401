"""What the decode service's life needs to know of its edge."""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import BatonError, Draining
from common.service.engine_thread import EnginePort
from decode_service.edge.live_requests import LiveRequests
from decode_service.edge.replicas import ReplicaBoard
from decode_service.handoff.transport import HandoffTransport
from decode_service.messages import Command, Drain


class DecodeEdge:
    """A ServiceEdge: requests are open towards clients, and the transport towards prefill replicas. Event loop only."""

    def __init__(
        self,
        *,
        engine: EnginePort[Command],
        live_requests: LiveRequests,
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
        """A replica is ready only when its fingerprint agreed, so a request admitted now can be computed."""
        return self._replicas.is_any_ready and not self._live_requests.is_draining

    @property
    def num_open(self) -> Mapping[str, int]:
        return {"num_requests": len(self._live_requests)}

    def drain(self) -> None:
        """The engine hears of it at the end only: until then it goes on with all that it has."""
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
