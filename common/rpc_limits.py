"""How many streams a server keeps open."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from common.errors import Overloaded
from common.rpc_errors import abort_with
from common.rpc_requests import Context, Continuation

_WATCH = "/grpc.health.v1.Health/Watch"


class StreamLimit(grpc.aio.ServerInterceptor):
    """Of each method that streams its answer at most `max_streams` at a time; more are RESOURCE_EXHAUSTED.

    The small calls (health, load) are not counted: however many streams there are, they are answered. Nor is Watch, of
    which each balanced client holds one: health bounds it by host. It must come before BoundedRequests, so that a
    stream whose request has not come yet counts.
    """

    def __init__(self, *, max_streams: int) -> None:
        self._max_streams = max_streams
        self._num_open: Counter[str] = Counter()

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not handler.response_streaming or method == _WATCH:
            return handler
        assert handler.request_streaming, "BoundedRequests comes after this"
        serve = handler.stream_stream

        async def write(requests: object, context: Context) -> None:
            await self._refuse_if_full(method, context)
            with self._counted(method):
                await serve(requests, context)

        async def generate(requests: object, context: Context) -> AsyncIterator[Any]:
            await self._refuse_if_full(method, context)
            with self._counted(method):
                async for response in serve(requests, context):
                    yield response

        return grpc.stream_stream_rpc_method_handler(
            generate if inspect.isasyncgenfunction(serve) else write,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _refuse_if_full(self, method: str, context: Context) -> None:
        if self._num_open[method] >= self._max_streams:
            await abort_with(context, Overloaded(f"{self._max_streams} streams of {method} are open"))

    @contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        self._num_open[method] += 1
        try:
            yield
        finally:
            self._num_open[method] -= 1
            if not self._num_open[method]:
                del self._num_open[method]  # callers name methods that there are not
