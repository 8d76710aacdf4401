"""Receives data from the client: the request's body, and the notice that the client has left."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from gateway.errors import ApiError, ClientLeft
from gateway.limits import HttpLimits

ResultT = TypeVar("ResultT")

_JSON = re.compile(rb"\s*application/json\s*(;(?!\s*charset\s*=)[^;]*|;\s*charset\s*=\s*\"?(utf-?8|us-ascii)\"?\s*)*")


async def read_json_body(
    receive: Receive, headers: Sequence[tuple[bytes, bytes]], *, limits: HttpLimits, hold: Callable[[int], None]
) -> bytes:
    """Reads the request's body and returns its bytes, which are not parsed.

    Calls `hold` with the number of bytes received so far, after each part but the last. An exception of `hold` ends the
    reading. Raises ClientLeft, or ApiError: 408 if the body comes too slowly, 413 if it is larger than
    `limits.max_request_bytes`, 415 if the headers do not declare plain JSON in UTF-8.
    """
    given = dict(headers)
    _check_kind(headers)
    length = given.get(b"content-length", b"")
    if length.isdigit() and int(length) > limits.max_request_bytes:
        raise _too_large(limits.max_request_bytes)
    body, num_paced = bytearray(), 0
    loop, step = asyncio.get_running_loop(), limits.min_body_rate * limits.body_window_s
    grace_ends_s = loop.time() + max(limits.body_grace_s, limits.body_window_s)
    try:
        async with asyncio.timeout(limits.body_timeout_s), asyncio.timeout_at(grace_ends_s) as pace:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                body += message.get("body", b"")
                if len(body) > limits.max_request_bytes:
                    raise _too_large(limits.max_request_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
                hold(len(body))
                if len(body) >= num_paced + step:
                    num_paced = len(body)
                    pace.reschedule(max(grace_ends_s, loop.time() + limits.body_window_s))
    except TimeoutError:
        how = f"within {limits.body_timeout_s:g} s, or more slowly than {limits.min_body_rate} bytes a second"
        raise ApiError(408, f"the body did not come {how}", code="request_timeout") from None


def _check_kind(headers: Sequence[tuple[bytes, bytes]]) -> None:
    kinds = [value.lower() for name, value in headers if name == b"content-type"] or [b""]
    if len(kinds) > 1 or not _JSON.fullmatch(kinds[0]):
        raise ApiError(415, "content-type: must be application/json, in UTF-8", param="content-type")
    codings = b",".join(value for name, value in headers if name == b"content-encoding").lower().split(b",")
    if any(coding.strip() not in (b"", b"identity") for coding in codings):
        message = "content-encoding: no coding is served, the body must be sent as it is"
        raise ApiError(415, message, param="content-encoding", headers={"accept-encoding": "identity"})


async def unless_left(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs `work` and returns its result. If the client leaves first, cancels `work` and raises ClientLeft."""
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
    """Waits for the disconnect message, and returns whether it came before `working` ended.

    After the end of `working` the message means only that the answer is complete. The message is the only sign that a
    client has left: data sent to such a client is dropped without an error.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    return not working.done()


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
