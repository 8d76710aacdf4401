"""The prefill service's gRPC edge as decode services reach it: a real server on loopback, in front of a scripted
engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from common.service.server import ServerLimits, ServiceServer
from prefill_service.edge.call import ReplicaLimits
from prefill_service.edge.prefill_edge import PREFILL_SERVICE, add_prefill_servicer
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from tests.handoff.samples import FINGERPRINT
from tests.handoff.scripted_prefill import ScriptedPrefill
from tests.support.no_matchers import no_matchers
from tests.wire.strategies import VOCAB_SIZE

LIMITS = ReplicaLimits(vocab_size=VOCAB_SIZE, max_context_tokens=4096)


@dataclass(frozen=True, slots=True)
class PrefillEdge:
    engine: ScriptedPrefill
    servicer: PrefillServicer
    server: ServiceServer
    address: str


async def start_prefill_edge(
    engine: ScriptedPrefill | None = None,
    *,
    tokens: Sequence[str] = (),
    limits: HandoffLimits | None = None,
    server_limits: ServerLimits | None = None,
    credentials: grpc.ServerCredentials | None = None,
    is_ready: bool = True,
    **servicer_options: Any,
) -> PrefillEdge:
    """Starts an edge on the caller's loop. It is ready unless told otherwise, and the caller stops its server.

    `servicer_options` are further arguments of PrefillServicer, or override those given here.
    """
    engine = engine or ScriptedPrefill()
    options = {
        "fingerprint": FINGERPRINT,
        "model_limits": LIMITS,
        "instance_id": "instance",
        "new_matcher": no_matchers,
        **servicer_options,
    }
    servicer = PrefillServicer(engine=engine, limits=limits or HandoffLimits(), **options)
    engine.deliver = servicer.deliver
    server = ServiceServer(service_name=PREFILL_SERVICE, tokens=tokens, limits=server_limits, credentials=credentials)
    add_prefill_servicer(servicer, server)
    port = await server.start("127.0.0.1:0")
    await server.set_ready(is_ready)
    return PrefillEdge(engine, servicer, server, f"127.0.0.1:{port}")


@asynccontextmanager
async def running_prefill_edge(**options: Any) -> AsyncIterator[PrefillEdge]:
    """Runs an edge until the end of the block. `options` are those of `start_prefill_edge`."""
    edge = await start_prefill_edge(**options)
    try:
        yield edge
    finally:
        await edge.server.stop(0)
