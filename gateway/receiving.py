"""What comes from the client: its request's body, and the news that it left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from gateway.errors import ApiError, ClientLeft

ResultT = TypeVar("ResultT")


async def read_json_body(
    receive: Receive, headers: Sequence[tuple[bytes, bytes]], *, max_bytes: int, timeout_s: float
) -> bytes:
    """Raises ApiError (408, 413, 415) or ClientLeft. More than `max_bytes` is never held."""
    given = dict(headers)
    media_type = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise ApiError(415, "content-type: must be application/json", param="content-type")
    length = given.get(b"content-length", b"")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", code="request_timeout") from None


async def unless_left(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`. Raises ClientLeft when the client leaves before; `work` is then cancelled, and over."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive, working))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and leaving.result():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive, working: asyncio.Task[Any]) -> bool:
    """Whether the client left before `working` ended. (The answer's end is told in the same way; and what is sent to a
    client that left ends as if it were taken.)
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    return not working.done()


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
