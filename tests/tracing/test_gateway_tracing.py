"""Tests of the gateway's span of an HTTP request, and of its client's calls as children of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.trace import StatusCode, Tracer
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.client.channel import trace_metadata
from common.telemetry.tracing import NO_TRACER
from gateway.edge import ApiKeys, HttpEdge, KeyCheck, TracedApp
from gateway.request_record import GatewayMetrics
from tests.tracing.spans import EndedSpans

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"
PATH = "/v1/completions"


@pytest.fixture
def spans() -> EndedSpans:
    return EndedSpans()


def answering(status: int, *, is_whole: bool = True, seen: list[dict[str, str]] | None = None) -> ASGIApp:
    """Returns an application that answers with `status` in two parts, of which the second is missing unless `is_whole`.
    It appends to `seen` the trace metadata that its client would send.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if seen is not None:
            seen.append(dict(trace_metadata()))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if is_whole:
            await send({"type": "http.response.body", "body": b"b"})

    return app


async def ask(
    app: ASGIApp, tracer: Tracer, path: str = PATH, *, method: str = "POST", keys: Sequence[str] = ()
) -> list[Message]:
    sent: list[Message] = []
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"host", b"gateway"), (b"traceparent", CALLER.encode())],
    }

    async def receive() -> Message:
        raise AssertionError("nothing is asked for")

    async def send(message: Message) -> None:
        sent.append(message)

    checked = KeyCheck(TracedApp(app, tracer=tracer), api_keys=ApiKeys(keys), covers_status=False)
    await HttpEdge(checked, metrics=GatewayMetrics(CollectorRegistry()))(scope, receive, send)
    return sent


async def test_a_request_continues_its_callers_trace_and_the_client_continues_its(spans: EndedSpans) -> None:
    seen: list[dict[str, str]] = []
    sent = await ask(answering(200, seen=seen), spans.tracer)

    span = spans.named(f"POST {PATH}")
    assert span.parent is not None and f"{span.parent.span_id:016x}" == "cd" * 8
    assert [metadata["traceparent"] for metadata in seen] == [f"00-{'ab' * 16}-{span.context.span_id:016x}-01"]
    assert span.attributes == {"http.request.method": "POST", "url.path": PATH, "http.response.status_code": 200}
    assert span.status.status_code is StatusCode.UNSET
    assert [message.get("body") for message in sent] == [None, b"a", b"b"], "the answer is as it was"


@pytest.mark.parametrize(("status", "is_error"), [(400, False), (500, True), (503, True)])
async def test_only_what_the_server_did_wrong_is_an_error(spans: EndedSpans, status: int, is_error: bool) -> None:
    await ask(answering(status), spans.tracer)

    assert (spans.all[0].status.status_code is StatusCode.ERROR) == is_error


async def test_an_answer_that_breaks_off_is_an_error(spans: EndedSpans) -> None:
    await ask(answering(200, is_whole=False), spans.tracer)

    assert spans.all[0].status.description == "the answer broke off"


@pytest.mark.parametrize(
    ("method", "path", "name", "attributes"),
    [
        pytest.param("POST", "/v1/anything-at-all", "POST", {"http.request.method": "POST"}, id="an unknown path"),
        pytest.param("GET", "/v1/models/anything-at-all", "GET /v1/models/{model}", {}, id="a model that is asked for"),
        pytest.param("FROB", PATH, f"HTTP {PATH}", {"http.request.method": "_OTHER"}, id="an unknown method"),
        pytest.param("POST", "/v1/" + "a" * 5000, "POST", {"url.path": "/v1/" + "a" * 252}, id="a long path"),
    ],
)
async def test_what_callers_make_up_names_no_span(
    spans: EndedSpans, method: str, path: str, name: str, attributes: dict[str, str]
) -> None:
    await ask(answering(404), spans.tracer, path, method=method)

    assert spans.names() == [name]
    assert attributes.items() <= dict(spans.all[0].attributes or {}).items()


async def test_who_shows_no_key_and_what_is_not_of_the_api_leave_no_span(spans: EndedSpans) -> None:
    sent = await ask(answering(200), spans.tracer, keys=["secret"])
    await ask(answering(200), spans.tracer, path="/metrics")

    assert sent[0]["status"] == 401
    assert not spans.all


async def test_a_gateway_that_does_not_trace_hands_the_callers_trace_on() -> None:
    seen: list[dict[str, str]] = []
    await ask(answering(200, seen=seen), NO_TRACER)

    assert seen == [{"traceparent": CALLER}]
