"""The gateway's span of each HTTP request under /v1/: the parent of what the services do for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, use_span
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.telemetry.trace_context import context_of


class TracedApp:
    """An ASGI application around another, whose calls of the client become children of the request's span.

    The span continues the trace that the request's `traceparent` names. It ends with the answer's last byte, and shows
    an error for a status from 500 on and for an answer that broke off.
    """

    def __init__(self, app: ASGIApp, *, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        span = self._tracer.start_span(
            scope["method"],
            context_of(_decoded(scope["headers"])),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )
        is_whole = False

        async def send_and_note(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if status != 404:  # else the path is anyone's invention: names of spans must be few
                    span.update_name(f"{scope['method']} {scope['path']}")
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        with use_span(span, end_on_exit=True):
            try:
                await self._app(scope, receive, send_and_note)
            finally:
                if not is_whole:
                    span.set_status(Status(StatusCode.ERROR, "the answer broke off"))


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    """HTTP's headers are Latin-1."""
    for name, value in headers:
        yield name.decode("latin-1"), value.decode("latin-1")
