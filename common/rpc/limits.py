"""How many streams a server keeps open."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import Overloaded
from common.rpc.errors import abort_with
from common.rpc.fair_places import FairPlaces, Full
from common.rpc.requests import ClientOf, Context, Continuation

_WATCH = "/grpc.health.v1.Health/Watch"


class StreamLimit(grpc.aio.ServerInterceptor):
    """Of each method that streams its answer at most `max_streams` at a time, which clients share; more are
    RESOURCE_EXHAUSTED.

    The small calls (health, load) are not counted: however many streams there are, they are answered. Nor is Watch, of
    which each balanced client holds one: health bounds it by host. It must come before BoundedRequests, so that a
    stream whose request has not come yet counts.
    """

    def __init__(self, *, max_streams: int, client_of: ClientOf) -> None:
        self._max_streams = max_streams
        self._client_of = client_of
        self._places: dict[str, FairPlaces] = {}  # by method

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not handler.response_streaming or method == _WATCH:
            return handler
        assert handler.request_streaming, "BoundedRequests comes after this"
        serve = handler.stream_stream

        async def write(requests: object, context: Context) -> None:
            client = self._client_of(context)
            taken_s = await self._take(method, client, context)
            try:
                await serve(requests, context)
            finally:
                self._places[method].give_back(client, taken_s)

        async def generate(requests: object, context: Context) -> AsyncIterator[Any]:
            client = self._client_of(context)
            taken_s = await self._take(method, client, context)
            try:
                async for response in serve(requests, context):
                    yield response
            finally:
                self._places[method].give_back(client, taken_s)

        return grpc.stream_stream_rpc_method_handler(
            generate if inspect.isasyncgenfunction(serve) else write,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _take(self, method: str, client: str, context: Context) -> float:
        places = self._places.setdefault(method, FairPlaces(self._max_streams))
        try:
            return places.take(client)
        except Full as full:
            message = f"{len(places)} streams of {method} are open"
            await abort_with(context, Overloaded(message, retry_after_s=full.retry_after_s))
