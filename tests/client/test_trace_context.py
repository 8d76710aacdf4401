"""A caller's span travels with its requests; without one, no trace metadata is sent."""

from __future__ import annotations

from collections.abc import Callable

from google.rpc import code_pb2
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span

from baton import Client
from tests.client.either_client import EitherClient
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


async def test_the_current_span_travels_with_the_request(
    server: ScriptedServer, open_client: Callable[..., EitherClient]
) -> None:
    server.inference.script = WHOLE
    with use_span(SPAN):
        await open_client(server.address).complete("Hi")

    metadata = server.inference.metadata.get(timeout=BOUND_S)
    assert (metadata["traceparent"], metadata["tracestate"]) == (TRACEPARENT, "vendor=value")


async def test_without_a_span_nothing_travels(server: ScriptedServer, open_client: Callable[..., EitherClient]) -> None:
    server.inference.script = WHOLE
    await open_client(server.address).complete("Hi")

    assert not {"traceparent", "tracestate"} & set(server.inference.metadata.get(timeout=BOUND_S))


async def test_a_token_and_a_span_travel_together(
    server: ScriptedServer, open_client: Callable[..., EitherClient]
) -> None:
    server.inference.script = WHOLE
    with use_span(SPAN):
        await open_client(server.address, token="secret").complete("Hi")

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
