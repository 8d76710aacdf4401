"""The common part of endpoints that read a JSON body: reads the body, takes a place, notices when the client leaves,
and ends the request.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from gateway.errors import CLIENT_LEFT_STATUS, ApiError, ClientLeft, api_error_of
from gateway.limits import HttpLimits
from gateway.open_requests import OpenRequest, OpenRequests
from gateway.request_record import GatewayMetrics, HttpRecord
from gateway.sending import send_error
from gateway.served_model import ModelCard, ServedModel

ResultT = TypeVar("ResultT")
_JSON = re.compile(rb"\s*application/json\s*(;(?!\s*charset\s*=)[^;]*|;\s*charset\s*=\s*\"?(utf-?8|us-ascii)\"?\s*)*")


class PostParts(TypedDict):
    """The keyword arguments of every PostEndpoint."""

    served_model: ServedModel
    open_requests: OpenRequests
    metrics: GatewayMetrics
    limits: HttpLimits


class PostEndpoint(ABC):
    """The ASGI application of one endpoint whose requests have a JSON body."""

    def __init__(self, **parts: Unpack[PostParts]) -> None:
        self._served_model = parts["served_model"]
        self._open_requests = parts["open_requests"]
        self._metrics = parts["metrics"]
        self._limits = parts["limits"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: HttpRecord = scope["state"]["record"]
        try:
            with self._open_requests.enter() as open_request:
                async with open_request.ends_when_failed():
                    body = await self._read(scope, receive, record.client)
                with self._open_requests.place(record.client):
                    await self._answer(body, open_request, record, receive, send)
        except ApiError as error:
            await send_error(error, scope, receive, send)
        except ClientLeft:
            record.status = CLIENT_LEFT_STATUS
            self._metrics.on_disconnect()

    @abstractmethod
    async def _answer(
        self, body: bytes, open_request: OpenRequest, record: HttpRecord, receive: Receive, send: Send
    ) -> None:
        """Answers the request with this body, and ends when `open_request` fails. Raises ApiError, unless an answer has
        begun, or ClientLeft.
        """

    async def _read(self, scope: Scope, receive: Receive, client: str) -> bytes:
        with self._open_requests.reading(client) as hold:
            return await _read_json_body(receive, scope["headers"], limits=self._limits, hold=hold)

    async def _card(self, receive: Receive) -> ModelCard:
        try:
            return await unless_left(receive, self._served_model.card())
        except BatonError as error:
            raise api_error_of(error, {}) from None


async def _read_json_body(
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
