"""How answers are written to the client."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from gateway.errors import ApiError

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies shall pass each event on as it comes
]


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return _json(content)

    async def send_to(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body, status_code=error.status, headers=error.headers)


class EventStreamWriter:
    """Server-sent events. A client that takes none holds `send` up."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def write(self, event: Any) -> None:
        await self._write(b"data: " + _json(event) + b"\n\n", more=True)

    async def end(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    async def break_off(self, error: ApiError) -> None:
        """The last event is the error; `[DONE]` does not follow."""
        await self._write(b"data: " + _json(error.body) + b"\n\n", more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
