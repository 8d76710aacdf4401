"""What the gateway has beside its API: the status page, and the spans of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from google.rpc import code_pb2
from opentelemetry.trace import StatusCode

from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started
from tests.e2e.running import wait_until
from tests.gateway.gateway_here import GatewayHere, gateway_here
from tests.support.loop_thread import LoopThread
from tests.tracing.spans import EndedSpans

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


def test_the_page_shows_the_decode_service_that_the_gateway_has(edge: GatewayHere, scripted: ScriptedServer) -> None:
    page = edge.ask("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")

    def decodes() -> Sequence[str]:
        shown = edge.ask("GET", "/status.json").json["decode"]
        return [each["address"] for each in shown if each["is_reachable"]]

    wait_until(lambda: decodes() == [scripted.address])


def test_the_page_can_be_switched_off(loop: LoopThread, scripted: ScriptedServer) -> None:
    with gateway_here(loop, scripted.address, status_page=False) as gateway:
        assert [gateway.ask("GET", path).status for path in ("/", "/status.json")] == [404, 404]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_every_choice_is_a_call_below_the_requests_span(
    loop: LoopThread, scripted: ScriptedServer, is_streamed: bool
) -> None:
    spans = EndedSpans()
    scripted.inference.script = [started("one"), delta([5], "x"), finished()]
    with gateway_here(loop, scripted.address, tracer=spans.tracer) as gateway:
        answer = gateway.ask("POST", "/v1/chat/completions", {**HELLO, "n": 2, "stream": is_streamed})
        assert answer.status == 200
        wait_until(lambda: bool(spans.all))
    (span,) = spans.all
    expected = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}"
    calls = [scripted.inference.metadata.get(timeout=BOUND_S) for _ in range(2)]
    assert [call["traceparent"].rpartition("-")[0] for call in calls] == [expected] * 2


def test_a_stream_that_ends_with_an_error_is_a_span_that_failed(loop: LoopThread, scripted: ScriptedServer) -> None:
    spans = EndedSpans()
    scripted.inference.script = [started(), delta([5], "x"), failure(code_pb2.INTERNAL, "broke")]
    with gateway_here(loop, scripted.address, tracer=spans.tracer) as gateway:
        assert gateway.ask("POST", "/v1/chat/completions", {**HELLO, "stream": True}).status == 200
        wait_until(lambda: bool(spans.all))
    (span,) = spans.all
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["http.response.status_code"] == 500
