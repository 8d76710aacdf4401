"""Sends answers to the HTTP client: JSON objects, errors and server-sent events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError, openai_error
from gateway.request_record import HttpRecord

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


def error_response(error: ApiError, record: HttpRecord | None = None) -> JsonResponse:
    """Returns the answer that tells the error. A request that could not be read has no `record`."""
    body = openai_error(error) if record is None else record.error_body(error)
    return JsonResponse(body, status_code=error.status, headers=error.headers)


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the error as the whole answer, and records it for the request's log line."""
    record: HttpRecord = scope["state"]["record"]
    record.error = error
    await error_response(error, record)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """A server-sent event. `data` is sent as JSON, or as it is if it is a string without line ends."""

    data: Mapping[str, Any] | str
    name: str = ""

    def encoded(self) -> bytes:
        data = self.data.encode() if isinstance(self.data, str) else _json(self.data)
        return (f"event: {self.name}\n".encode() if self.name else b"") + b"data: " + data + b"\n\n"


class EventStreamWriter:
    """Writes server-sent events, large ones in slices. `send` waits for a client that reads slowly."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def write(self, events: Iterable[ServerEvent]) -> None:
        data = bytearray()
        for event in events:
            data += event.encoded()
            while len(data) > SLICE_BYTES:
                await self._send_part(bytes(data[:SLICE_BYTES]))
                del data[:SLICE_BYTES]
        if data:
            await self._send_part(bytes(data))

    async def end(self, events: Iterable[ServerEvent]) -> None:
        """Writes the last events of the stream."""
        await self.write(events)
        await self._send({"type": "http.response.body", "body": b""})

    async def _send_part(self, part: bytes) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": True})


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _LINE_END.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode()
