"""The prefill edge as decode services meet it: a real server on loopback, in front of a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from common.service.server import ServerLimits, ServiceServer
from prefill_service.edge.server import PREFILL_SERVICE, add_prefill_servicer
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from tests.handoff.homes import LIMITS
from tests.handoff.samples import FINGERPRINT
from tests.handoff.scripted_prefill import ScriptedPrefill


@dataclass(frozen=True, slots=True)
class PrefillEdge:
    engine: ScriptedPrefill
    servicer: PrefillServicer
    address: str


@asynccontextmanager
async def running_prefill_edge(
    *,
    tokens: Sequence[str] = (),
    limits: HandoffLimits | None = None,
    server_limits: ServerLimits | None = None,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[PrefillEdge]:
    engine = ScriptedPrefill()
    servicer = PrefillServicer(
        engine=engine,
        fingerprint=FINGERPRINT,
        model_limits=LIMITS,
        instance_id="i",
        limits=limits or HandoffLimits(),
    )
    engine.deliver = servicer.deliver
    server = ServiceServer(service_name=PREFILL_SERVICE, tokens=tokens, limits=server_limits, credentials=credentials)
    add_prefill_servicer(servicer, server)
    port = await server.start("127.0.0.1:0")
    await server.set_ready(True)
    yield PrefillEdge(engine, servicer, f"127.0.0.1:{port}")
    await server.stop(0)
