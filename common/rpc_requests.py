"""Reads and parses the one request of a unary call by the rules of our streams: bounded in time, refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common.errors import InvalidRequest
from common.rpc_errors import abort_with

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class BoundedRequests(grpc.aio.ServerInterceptor):
    """A call whose request does not come within `timeout_s`, or cannot be parsed, is INVALID_ARGUMENT.

    gRPC itself waits for it without an end, and reports what it cannot parse as its own fault. To it such a call is a
    stream of requests from here on, of which the handler gets the first.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        parse = handler.request_deserializer or bytes

        async def respond(_requests: object, context: Context) -> Any:
            return await handler.unary_unary(await self._request(context, parse), context)

        async def stream(_requests: object, context: Context) -> None:
            await handler.unary_stream(await self._request(context, parse), context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(respond, response_serializer=handler.response_serializer)

    async def _request(self, context: Context, parse: Callable[[bytes], Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await context.read()
        except TimeoutError:
            await abort_with(context, InvalidRequest("request", f"did not arrive within {self._timeout_s} s"))
        if not isinstance(data, bytes):
            await abort_with(context, InvalidRequest("request", "is absent: the stream ended before it"))
        try:
            return parse(data)
        except DecodeError as error:
            await abort_with(context, InvalidRequest("request", f"not a message of this call ({error})"))
