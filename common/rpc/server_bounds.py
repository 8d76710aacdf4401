"""Server interceptors that limit callers: how many streams are open, how late and how large a request may be, and how
late an answer may be read.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message

from common.addresses import host_and_port, is_loopback, network_of
from common.errors import InvalidRequest, Overloaded, RequestCancelled
from common.rpc.aio import whole_read
from common.rpc.errors import abort_with
from common.rpc.fair_shares import FairPlaces, Full, HeldPlace
from common.rpc.messages import ProtocolError, require_few_fields

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


ClientOf = Callable[[Context], str]
"""A function that returns the name of a call's client. Clients share a server's streams by name."""

_WATCH = "/grpc.health.v1.Health/Watch"
MAX_REQUEST_FIELDS = 16_384
"""The most protobuf fields of a request; each message of a chat has a few.

Without this limit, as many empty fields as fit into 4 MiB would take a third of a second to parse.
"""


def clients_told_apart(tokens: Sequence[str]) -> ClientOf:
    """Returns a function that names the client of a call: by its token if there are several tokens, else by its host.

    A host is one client, however many connections it opens. All callers on this machine without a known token are one
    client.
    """
    numbers = {f"Bearer {token}": f"token {number}" for number, token in enumerate(tokens)} if len(tokens) > 1 else {}

    def client_of(context: Context) -> str:
        shown = (str(value) for key, value in context.invocation_metadata() or () if key == "authorization")
        return numbers.get(next(shown, "")) or _whose(unquote(str(context.peer())).partition(":")[2])

    return client_of


def _whose(address: str) -> str:
    """Returns the name of the client at `address`: "loopback", the IPv4 address, or the /64 network of an IPv6 host.

    A text that is not an address is returned unchanged.
    """
    try:
        host, _ = host_and_port(address)
    except ValueError:
        return address
    return "loopback" if is_loopback(address) else network_of(host)


BY_ADDRESS = clients_told_apart(())


class StreamLimit(grpc.aio.ServerInterceptor):
    """Limits the open streams of each method that streams its answer. Further calls end as RESOURCE_EXHAUSTED.

    Clients share the `max_streams` of a method fairly (FairPlaces). Calls with a single answer (health, load) are not
    limited. Neither is the health service's Watch, which has a limit per host of its own. This interceptor must come
    before BoundedRequests, so that a stream counts before its request has arrived.
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
            place = await self._take(method, context)
            try:
                await begin_answer(context)
                await serve(requests, context)
            finally:
                self._places[method].give_back(place)

        async def generate(requests: object, context: Context) -> AsyncIterator[Any]:
            place = await self._take(method, context)
            try:
                await begin_answer(context)
                async for response in serve(requests, context):
                    yield response
            finally:
                self._places[method].give_back(place)

        return grpc.stream_stream_rpc_method_handler(
            generate if inspect.isasyncgenfunction(serve) else write,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _take(self, method: str, context: Context) -> HeldPlace:
        """Takes a stream's place at `method` for the client, or aborts the call as Overloaded."""
        places = self._places.setdefault(method, FairPlaces(self._max_streams))
        try:
            return places.take((self._client_of(context), ""))
        except Full as full:
            message = f"{len(places)} streams of {method} are open"
            await abort_with(context, Overloaded(message, retry_after_s=full.retry_after_s))


async def begin_answer(context: Context) -> None:
    """Sends an answer's initial metadata before its first message, which tells the client that this service is there.

    gRPC would send both at once, and a status that comes while they wait for a reader would send the metadata again,
    which gRPC refuses: the stream would stay open without a status.
    """
    await context.send_initial_metadata(())


class BoundedAnswers(grpc.aio.ServerInterceptor):
    """Ends a call with a single answer as CANCELLED if its client has not taken the answer within `timeout_s`.

    gRPC itself would wait without a limit. To write the answer itself, this interceptor declares the call to gRPC as a
    stream of answers. It must come before StreamLimit, which does not count such calls, and before BoundedRequests.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.response_streaming:
            return handler
        assert handler.request_streaming, "BoundedRequests comes after this"

        async def respond(requests: object, context: Context) -> None:
            answer = await handler.stream_unary(requests, context)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await context.write(answer)
            except TimeoutError:
                await abort_with(context, RequestCancelled(f"the client took no answer for {self._timeout_s} s"))

        return grpc.stream_stream_rpc_method_handler(
            respond,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class BoundedRequests(grpc.aio.ServerInterceptor):
    """Ends a call as INVALID_ARGUMENT if its request is late, has too many fields, or cannot be parsed.

    The limits are `timeout_s` and MAX_REQUEST_FIELDS. gRPC itself would wait without a limit, and report a request that
    it cannot parse as a fault of the server. To read the request itself, this interceptor declares the call to gRPC as
    a stream of requests, and passes the first one to the handler.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        kind = getattr(handler.request_deserializer, "__self__", None)  # the message class, which has this FromString

        async def respond(_requests: object, context: Context) -> Any:
            await begin_answer(context)
            return await handler.unary_unary(await self._request(context, kind), context)

        async def stream(_requests: object, context: Context) -> None:
            await handler.unary_stream(await self._request(context, kind), context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(respond, response_serializer=handler.response_serializer)

    async def _request(self, context: Context, kind: type[Message] | None) -> Message | bytes:
        """Reads the one request of a call. Returns it parsed as `kind`, or as bytes if `kind` is None.

        Aborts the call as an invalid request if none arrives in time, the stream ends first, it has too many fields, or
        it cannot be parsed.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await whole_read(context.read())
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
