"""Reads and parses the one request of a unary call by the rules of our streams: bounded in time and in number of
fields, refused by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message

from common.addresses import host_and_port, is_loopback, network_of
from common.errors import InvalidRequest
from common.rpc.errors import abort_with
from common.wire.codec_checks import ProtocolError
from common.wire.field_bound import require_few_fields

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


ClientOf = Callable[[Context], str]
"""With whom others share: the name of whoever calls."""

MAX_REQUEST_FIELDS = 16_384
"""Each message of a chat is one. As many empty ones as fit into 4 MiB take a third of a second to parse."""


def clients_told_apart(tokens: Sequence[str]) -> ClientOf:
    """By the token that they show where there are several; else by their host, which is one however many connections it
    opens. Of this machine those without a known token are one.
    """
    numbers = {f"Bearer {token}": f"token {number}" for number, token in enumerate(tokens)} if len(tokens) > 1 else {}

    def client_of(context: Context) -> str:
        shown = (str(value) for key, value in context.invocation_metadata() or () if key == "authorization")
        return numbers.get(next(shown, "")) or _whose(unquote(str(context.peer())).partition(":")[2])

    return client_of


def _whose(address: str) -> str:
    try:
        host, _ = host_and_port(address)
    except ValueError:
        return address
    return "loopback" if is_loopback(address) else network_of(host)


BY_ADDRESS = clients_told_apart(())


class BoundedRequests(grpc.aio.ServerInterceptor):
    """A call whose request does not come within `timeout_s`, has more than MAX_REQUEST_FIELDS or cannot be parsed, is
    INVALID_ARGUMENT.

    gRPC itself waits for it without an end, and reports what it cannot parse as its own fault. To it such a call is a
    stream of requests from here on, of which the handler gets the first.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        kind = getattr(handler.request_deserializer, "__self__", None)  # whose FromString it is

        async def respond(_requests: object, context: Context) -> Any:
            return await handler.unary_unary(await self._request(context, kind), context)

        async def stream(_requests: object, context: Context) -> None:
            await handler.unary_stream(await self._request(context, kind), context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(respond, response_serializer=handler.response_serializer)

    async def _request(self, context: Context, kind: type[Message] | None) -> Message | bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await context.read()
        except TimeoutError:
            await abort_with(context, InvalidRequest("request", f"did not arrive within {self._timeout_s} s"))
        if not isinstance(data, bytes):
            await abort_with(context, InvalidRequest("request", "is absent: the stream ended before it"))
        if kind is None:
            return data
        try:
            require_few_fields(data, kind, at_most=MAX_REQUEST_FIELDS)
            return kind.FromString(data)
        except ProtocolError as error:
            await abort_with(context, InvalidRequest(error.field, error.message))
        except DecodeError as error:
            await abort_with(context, InvalidRequest("request", f"not a message of this call ({error})"))
