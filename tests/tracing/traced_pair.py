"""A pair over gRPC in this process that exports its spans to a receiver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from opentelemetry.trace import Tracer

from baton.client import AsyncClient
from common.config.settings import ProcessSettings
from common.telemetry import span_export
from common.telemetry.span_export import SpanExport
from common.telemetry.tracing import process_tracer
from tests.support.free_ports import free_address
from tests.support.services_here import BOUND_S, ServiceHere, pair_here

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
    """Runs a pair whose services and caller export spans to `endpoint`, except those that have an endpoint of their
    own. At the end of the block all spans have been exported.
    """
    caller = ProcessSettings(
        listen=free_address(), otlp_endpoint=endpoint if caller_endpoint is None else caller_endpoint
    )
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(span_export, "SpanExport", partial(SpanExport, flush_timeout_s=BOUND_S))

        def tracer_of(settings: ProcessSettings, program: str) -> Tracer:
            return stack.enter_context(process_tracer(settings, service=program, instance_id="here"))

        caller_tracer = tracer_of(caller, "caller")
        pair = await stack.enter_async_context(
            pair_here(
                model,
                prefill={"chunk_tokens": CHUNK_TOKENS, "max_batch_tokens": 64, "otlp_endpoint": endpoint},
                decode={"otlp_endpoint": endpoint if decode_endpoint is None else decode_endpoint},
                tracer_of=tracer_of,
                max_rows=4,
            )
        )
        yield TracedPair(pair.decode.client, caller_tracer, pair.prefill, pair.decode)
