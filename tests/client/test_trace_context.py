"""A caller's span travels with its requests; without one, no trace metadata is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from google.rpc import code_pb2
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span

from baton import AsyncClient, Client
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started

SPAN = NonRecordingSpan(
    SpanContext(
        trace_id=0xAB,
        span_id=0xCD,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState([("vendor", "value")]),
    )
)
TRACEPARENT = f"00-{'ab':0>32}-{'cd':0>16}-01"
WHOLE = (started(), delta([1, 2], "ab"), finished())

Complete = Callable[..., Awaitable[object]]


@pytest.fixture(params=["Client", "AsyncClient"])
async def complete(request: pytest.FixtureRequest, server: ScriptedServer) -> AsyncIterator[Complete]:
    """A function that runs one generation with either client. Its `options` are the client's."""

    async def run(**options: Any) -> None:
        if request.param == "Client":
            with Client(server.address, **options) as client:
                client.complete("Hi")
        else:
            async with AsyncClient(server.address, **options) as client:
                await client.complete("Hi")

    yield run


async def test_the_current_span_travels_with_the_request(server: ScriptedServer, complete: Complete) -> None:
    server.inference.script = WHOLE
    with use_span(SPAN):
        await complete()

    metadata = server.inference.metadata.get(timeout=BOUND_S)
    assert (metadata["traceparent"], metadata["tracestate"]) == (TRACEPARENT, "vendor=value")


async def test_without_a_span_nothing_travels(server: ScriptedServer, complete: Complete) -> None:
    server.inference.script = WHOLE
    await complete()

    assert not {"traceparent", "tracestate"} & set(server.inference.metadata.get(timeout=BOUND_S))


async def test_a_token_and_a_span_travel_together(server: ScriptedServer, complete: Complete) -> None:
    server.inference.script = WHOLE
    with use_span(SPAN):
        await complete(token="secret")

    metadata = server.inference.metadata.get(timeout=BOUND_S)
    assert (metadata["authorization"], metadata["traceparent"]) == ("Bearer secret", TRACEPARENT)


async def test_a_resumed_stream_stays_in_its_trace(server: ScriptedServer, client: Client) -> None:
    server.inference.scripts.append((started(), delta([1], "a"), failure(code_pb2.UNAVAILABLE, "lost")))
    server.inference.script = (started(), delta([2], "b"), finished())
    with Client(server.address, resume=True) as resuming:
        with use_span(SPAN):
            stream = resuming.generate("Hi")
        list(stream)  # after the span has ended

    sent = [server.inference.metadata.get(timeout=BOUND_S) for _ in range(2)]
    assert [metadata["traceparent"] for metadata in sent] == [TRACEPARENT, TRACEPARENT]
