"""Opens an OpenTelemetry span for each HTTP request under /v1/, the parent of the services' spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, use_span
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.telemetry.tracing import context_of
from gateway.request_record import NO_ROUTE, HttpRecord

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})
_MAX_PATH_CHARS = 256


class TracedApp:
    """An ASGI layer that opens a span for each request, as the parent of the gRPC calls' spans.

    The span continues the trace of the request's `traceparent` header. It ends with the answer's last byte and carries
    the status that is logged. It is marked as an error for a status from 500 on, and for an answer that broke off. Its
    name has only the method and the route. The layer lies inside the key check, so a request without a key gets no
    span.
    """

    def __init__(self, app: ASGIApp, *, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        record: HttpRecord = scope["state"]["record"]
        is_known = scope["method"] in _METHODS
        method = scope["method"] if is_known else "HTTP"
        span = self._tracer.start_span(
            method if record.route == NO_ROUTE else f"{method} {record.route}",
            context_of(_decoded(scope["headers"])),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method if is_known else "_OTHER",
                "url.path": scope["path"][:_MAX_PATH_CHARS],
            },
        )
        is_whole = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_whole
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        with use_span(span, end_on_exit=True):
            try:
                await self._app(scope, receive, send_and_note)
            finally:
                span.set_attribute("http.response.status_code", record.status)
                if not is_whole:
                    span.set_status(Status(StatusCode.ERROR, "the answer broke off"))
                elif record.status >= 500:
                    span.set_status(Status(StatusCode.ERROR))


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    """Decodes the headers' names and values, which are Latin-1 in HTTP."""
    for name, value in headers:
        yield name.decode("latin-1"), value.decode("latin-1")
