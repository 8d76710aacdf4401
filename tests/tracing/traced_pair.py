"""A pair over gRPC in this process, whose spans go to a receiver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.trace import Tracer

import decode_service.main
import prefill_service.main
from baton.client import AsyncClient
from baton.server_info import HealthStatus
from common.config.process_settings import ProcessSettings
from common.config.settings import DecodeSettings, PrefillSettings
from common.telemetry.tracing import process_tracer
from tests.support.services_here import ServiceHere, free_address, serving_here

CHUNK_TOKENS = 32


@dataclass(frozen=True)
class TracedPair:
    client: AsyncClient
    tracer: Tracer
    prefill: ServiceHere
    decode: ServiceHere


@asynccontextmanager
async def traced_pair(
    model: Path,
    *,
    endpoint: str,
    decode_endpoint: str | None = None,
    caller_endpoint: str | None = None,
) -> AsyncIterator[TracedPair]:
    """`endpoint` is everyone's who has none of their own. Once the pair is left, all spans have been exported."""
    common: dict[str, Any] = {"model": str(model), "dtype": "float32", "num_threads": 1, "max_rows": 4}
    prefill = PrefillSettings(
        listen=free_address(), chunk_tokens=CHUNK_TOKENS, max_batch_tokens=64, otlp_endpoint=endpoint, **common
    )
    decode = DecodeSettings(
        listen=free_address(),
        prefill=(prefill.listen,),
        otlp_endpoint=endpoint if decode_endpoint is None else decode_endpoint,
        **common,
    )
    caller = ProcessSettings(
        listen=free_address(), otlp_endpoint=endpoint if caller_endpoint is None else caller_endpoint
    )
    async with AsyncExitStack() as stack:

        def tracer_of(settings: ProcessSettings, service: str) -> Tracer:
            return stack.enter_context(process_tracer(settings, service=service, instance_id="here"))

        caller_tracer = tracer_of(caller, "caller")
        prefill_here = await stack.enter_async_context(
            serving_here(
                prefill_service.main,
                prefill,
                "baton.v1.Prefill",
                tracer=tracer_of(prefill, "prefill_service"),
            )
        )
        decode_here = await stack.enter_async_context(
            serving_here(
                decode_service.main,
                decode,
                "baton.v1.Inference",
                tracer=tracer_of(decode, "decode_service"),
            )
        )
        await decode_here.turns(HealthStatus.SERVING)
        yield TracedPair(decode_here.client, caller_tracer, prefill_here, decode_here)
