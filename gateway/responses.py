"""Sends answers to the HTTP client: JSON objects, errors and server-sent events."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError

SLICE_BYTES = 64 << 10
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # makes proxies pass each event on at once
]
_LINE_END = re.compile("[\x85\u2028\u2029]")
"""Characters at which some readers of server-sent events end a line. In JSON they occur only within strings."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _json(content)

    async def send_to(self, send: Send) -> None:
        """Sends the answer in slices. Returns once the client has taken all of them; `send` waits for a client that
        reads slowly.
        """
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), SLICE_BYTES):
            part = self.body[start : start + SLICE_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body, status_code=error.status, headers=error.headers)


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the error as the whole answer, and records it for the request's log line."""
    scope["state"]["record"].error = error
    await error_response(error)(scope, receive, send)


class EventStreamWriter:
    """Writes server-sent events. `send` waits for a client that reads slowly."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def write(self, event: Any) -> None:
        await self._write(b"data: " + _json(event) + b"\n\n", more=True)

    async def end(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    async def break_off(self, error: ApiError) -> None:
        """Sends the error as the last event of the stream, without `[DONE]` after it."""
        await self._write(b"data: " + _json(error.body) + b"\n\n", more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _LINE_END.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()
