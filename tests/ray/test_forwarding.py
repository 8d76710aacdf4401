"""Tests of forwarding HTTP requests to the gateway's process, which is a scripted server here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from baton_ray.forwarding import Forwarder
from tests.support.stream_server import Serve, StreamServer

BOUND_S = 60.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: a\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def forwarder_to(serve: Serve) -> AsyncIterator[Forwarder]:
    server = StreamServer(serve)
    forwarder = Forwarder(server.address)
    try:
        async with asyncio.timeout(BOUND_S):
            yield forwarder
    finally:
        await forwarder.close()
        await server.close()


def answering(answer: bytes, heads: list[bytes] | None = None) -> Serve:
    """Returns a server that adds a request's head to `heads`, sends this answer and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(head)
        writer.write(answer)
        writer.close()

    return serve


def request(
    method: str = "GET", path: str = "/v1/models", body: bytes = b"", root_path: str = "", **headers: str
) -> Request:
    sent = {"host": "baton.example", "connection": "keep-alive", **headers}
    if body:
        sent["content-length"] = str(len(body))
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(path),
        "root_path": root_path,
        "raw_path": path.encode(),
        "query_string": b"a=b%20c",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "server": ("127.0.0.1", 8000),
        "scheme": "http",
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(scope, receive)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def body_of(response: Response) -> list[bytes]:
    assert isinstance(response, StreamingResponse)
    return [bytes(part) async for part in response.body_iterator]  # type: ignore[arg-type]


async def test_a_request_is_passed_on_with_its_headers_and_body_but_not_those_of_its_connection() -> None:
    seen = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        head = await reader.readuntil(b"\r\n\r\n")
        seen = head + await reader.readexactly(5)
        writer.write(b"HTTP/1.1 429 Too Many\r\nretry-after: 3\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        writer.close()

    async with forwarder_to(serve) as forwarder:
        response = await forwarder.forward(request("POST", "/v1/completions", b"hello", authorization="Bearer key"))
        assert (response.status_code, await body_of(response)) == (429, [b"no"])
    assert response.raw_headers == [(b"retry-after", b"3"), (b"content-length", b"2")]
    first, *lines = seen.partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert first == b"POST /v1/completions?a=b%20c HTTP/1.1"
    assert sorted(line.lower() for line in lines) == [
        b"authorization: bearer key",
        b"content-length: 5",
        b"host: baton.example",
    ]
    assert seen.endswith(b"hello")


@pytest.mark.parametrize(
    ("root_path", "path", "passed_on"),
    [
        ("", "/v1/models", b"/v1/models"),
        ("/llm", "/llm/v1/models/a%2Fb", b"/v1/models/a%2Fb"),
        ("/our llm", "/our%20llm/health", b"/health"),
        ("/llm", "/llm", b"/"),
    ],
)
async def test_the_prefix_of_the_application_is_not_passed_on(root_path: str, path: str, passed_on: bytes) -> None:
    heads: list[bytes] = []
    async with forwarder_to(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", heads)) as forwarder:
        await body_of(await forwarder.forward(request(path=path, root_path=root_path)))
    assert heads[0].split()[1] == passed_on + b"?a=b%20c"


async def test_parts_of_a_stream_come_as_they_are_sent() -> None:
    goes_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunk(b"data: 1\n\n"))
        await goes_on.wait()
        writer.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        writer.close()

    async with forwarder_to(serve) as forwarder:
        response = await forwarder.forward(request())
        assert response.raw_headers == [(b"content-type", b"text/event-stream")]
        assert isinstance(response, StreamingResponse)
        parts = aiter(response.body_iterator)
        assert await anext(parts) == b"data: 1\n\n"
        goes_on.set()
        assert [part async for part in parts] == [b"data: 2\n\n"]


async def test_a_stream_that_breaks_off_raises_an_error() -> None:
    async with forwarder_to(answering(HEAD + chunk(b"data: 1\n\n"))) as forwarder:
        response = await forwarder.forward(request())
        with pytest.raises(httpx2.RemoteProtocolError):
            await body_of(response)


async def test_a_caller_who_stops_to_read_ends_the_connection() -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunk(b"data: 1\n\n"))
        await reader.read()
        ended.set()
        writer.close()

    async with forwarder_to(serve) as forwarder:
        response = await forwarder.forward(request())
        assert isinstance(response, StreamingResponse)

        async def read() -> None:
            async for _ in response.body_iterator:
                reading.set()

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        await asyncio.wait({task})
        await ended.wait()


async def test_without_a_gateway_the_answer_is_an_error_in_the_form_of_the_api() -> None:
    async with forwarder_to(answering(b"")) as forwarder:
        response = await forwarder.forward(request())
    assert response.status_code == 502
    assert b'"code":"bad_gateway"' in response.body
