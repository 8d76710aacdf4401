"""The client of the decode service for programs that use asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack, overload

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from baton.client.channel import ChannelOptions, Tls, trace_metadata
from baton.client.generation import CompletionBuilder, Generation, Progress, bounded_if_any_s, bounded_s
from baton.client.servers import ANSWER_TIMEOUT_S, NOT_ONE_ANSWER, AsyncServers, CommonServer, Opening, Server
from baton.codec import health_from_wire, inference_load_from_wire, model_info_from_wire
from baton.errors import BatonError, Cancelled, Internal, NotFound, Unavailable, error_from_rpc
from baton.events import Completion, Event
from baton.requests import (
    ChatOptions,
    CompleteOptions,
    GenerateOptions,
    JsonSchema,
    ModelT,
    detokenize_request,
    generate_request,
    parser_of,
    tokenize_request,
)
from baton.server_info import HealthStatus, InferenceLoad, ModelInfo, Tokenized
from baton.v1 import inference_pb2
from common.rpc.aio import whole_read
from common.text.chat_messages import ChatMessage

_BUSY_S = 0.1


class AsyncEventStream(AsyncIterator[Event]):
    """The events of one generation. Closing it, leaving its `async with` block or dropping it cancels the call."""

    def __init__(
        self, generation: Generation, servers: AsyncServers, *, same_server_as: AsyncEventStream | None = None
    ) -> None:
        self._generation = generation
        self._servers = servers
        self._common: CommonServer = CommonServer() if same_server_as is None else same_server_as._common
        self._beginnings = servers.beginnings_of(generation.request)
        # Sent with every call, because the stream belongs to the span that was open when it began.
        self._metadata = trace_metadata()
        self._is_closed = asyncio.Event()
        self._server: Server | None = None  # of the last call
        self._avoided: set[Server] = set()  # those tried, until all are or one accepts the request
        self._opening = Opening(self._beginnings)  # of the last call
        self._call: Any = None  # None until a server is ready
        self._has_answered = False  # the last call's server
        with suppress(Unavailable):  # the first read tries again, and raises it
            if (server := servers.take(self._beginnings, common=self._common)) is not None:
                self._open_call(server)

    @property
    def progress(self) -> Progress:
        """Returns the output so far. It is enough to continue the generation later, however the stream ended."""
        return self._generation.progress

    async def __anext__(self) -> Event:
        """Returns the next event. Raises StopAsyncIteration after Finished, and a BatonError when the request fails."""
        try:
            while True:
                try:
                    if self._call is None:
                        await self._open_call_when_ready()
                    if not self._has_answered:
                        await self._wait_for_answer()
                    message = await whole_read(self._call.read())
                except asyncio.CancelledError:
                    self._cancel_call()
                    if _is_task_cancelled():
                        raise
                    raise Cancelled("the stream was closed") from None
                except grpc.RpcError as failure:
                    error = error_from_rpc(failure)
                    if self._server is not None and not self._is_closed.is_set():
                        self._servers.note_failed(self._server, error)
                except Unavailable as failure:  # no server is known, or it does not answer
                    error = failure
                else:
                    if message is grpc.aio.EOF:
                        break
                    if self._server is not None and message.HasField("started"):
                        self._servers.note_accepted(self._server, self._opening)
                        self._avoided.clear()
                    if (event := self._generation.accept(message)) is not None:
                        return event
                    continue
                if self._generation.has_finished:  # all events have come, and only the call's own status is lost
                    break
                await self._resume(error)
            self._generation.end()
        except BatonError:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancels the call if it is still open; both services drop the request. Closing twice is fine."""
        self._is_closed.set()
        self._servers.wake()
        self._cancel_call()

    async def _resume(self, error: BatonError) -> None:
        """Waits until another call may follow the one that `error` broke. Raises the error that ends the stream if none
        may.
        """
        if not self._is_closed.is_set():
            is_another_ready = self._server is not None and self._servers.avoid(self._server, self._avoided)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._generation.pause_s_after(error, is_another_ready=is_another_ready)):
                    await self._is_closed.wait()
        if self._is_closed.is_set():
            raise Cancelled("the stream was closed")
        self._call = None

    async def _wait_for_answer(self) -> None:
        """Waits for the head of the call's answer. Raises Unavailable, and cancels the call, if it does not come."""
        assert self._server is not None
        timeout_s = self._generation.begin_wait_for_answer()
        if not await _answers(self._call, timeout_s):
            raise self._servers.note_hung(self._server, timeout_s)
        self._generation.answered()
        self._has_answered = True

    async def _open_call_when_ready(self) -> None:
        server = await self._servers.take_when_ready(
            self._beginnings,
            avoided=self._avoided,
            common=self._common,
            timeout_s=self._generation.remaining_s,
            max_wait_s=self._generation.begin_wait(),
            is_given_up=self._is_closed.is_set,
        )
        self._open_call(server)

    def _open_call(self, server: Server) -> None:
        servers, self._server = self._servers, server
        opening = self._opening = Opening(self._beginnings)
        self._has_answered = False
        try:
            request, timeout_s = self._generation.next_call()
            self._call = server.inference.Generate(request, timeout=timeout_s, metadata=self._metadata)
        except BaseException:
            servers.give_back(server, opening)
            raise
        self._call.add_done_callback(lambda _: servers.give_back(server, opening))

    def _cancel_call(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._cancel_call()


class AsyncClient:
    """A client of one decode service or of several. With several, each request goes to one that is ready, if possible
    to one that has the request's beginning in its cache.

    `address` is "HOST:PORT", "HOST:PORT,HOST:PORT,...", "dns:///NAME:PORT" or "file:///PATH".
    `rpc_timeout_s` bounds the small calls (model_info, load, health). A generation has its own `timeout_s`, which
    travels as the request's deadline; None means no limit. `token` is sent with every call but health.

    With `resume`, a generation whose call ends UNAVAILABLE continues in another call. It fails when no event has come
    for `resume_timeout_s` after the break. Before any server has accepted the request, `admission_timeout_s` applies
    instead (by default the same). Construct the client in a running event loop.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        rpc_timeout_s: float = 10.0,
        resume: bool = False,
        resume_timeout_s: float = 60.0,
        admission_timeout_s: float | None = None,
        channel_overrides: ChannelOptions | None = None,
    ) -> None:
        self.address = address
        self._resume_timeout_s = bounded_s("resume_timeout_s", resume_timeout_s) if resume else None
        self._admission_timeout_s = bounded_if_any_s("admission_timeout_s", admission_timeout_s)
        self._rpc_timeout_s = bounded_s("rpc_timeout_s", rpc_timeout_s)
        self._servers = AsyncServers(address, tls=tls, token=token, channel_overrides=channel_overrides)

    def generate(
        self,
        prompt: str | None = None,
        *,
        same_server_as: AsyncEventStream | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncEventStream:
        """Starts a generation, as `Client.generate` does, which explains the options."""
        generation = Generation(
            generate_request(prompt, options),
            timeout_s=timeout_s,
            resume_timeout_s=self._resume_timeout_s,
            admission_timeout_s=self._admission_timeout_s,
        )
        return AsyncEventStream(generation, self._servers, same_server_as=same_server_as)

    @overload
    async def complete(
        self, prompt: str | None = None, *, json_schema: type[ModelT], **options: Unpack[CompleteOptions]
    ) -> Completion[ModelT]: ...

    @overload
    async def complete(
        self, prompt: str | None = None, *, json_schema: JsonSchema | None = None, **options: Unpack[CompleteOptions]
    ) -> Completion: ...

    async def complete(
        self, prompt: str | None = None, *, json_schema: JsonSchema | None = None, **options: Unpack[CompleteOptions]
    ) -> Completion:
        """Runs `generate` to its end and returns all its output as one Completion.

        With a `json_schema`, `Completion.parsed` is the object that the model wrote, after its reasoning, or None if it
        called tools instead. If the schema is a class, that class may refuse the object, and its error is raised.
        """
        async with self.generate(prompt, json_schema=json_schema, **options) as events:
            is_all = not (events.progress.generated_token_ids or options.get("include_stop_str_in_output"))
            parse = parser_of(json_schema, events._generation.request) if is_all else None
            builder = CompletionBuilder(parse, reasoning=options.get("reasoning"))
            async for event in events:
                if (completion := builder.add(event)) is not None:
                    return completion
        raise Internal("the stream ended before it finished", reason="PROTOCOL")

    async def model_info(self) -> ModelInfo:
        request = inference_pb2.GetModelInfoRequest()
        return model_info_from_wire(await self._ask(lambda server: server.inference.GetModelInfo, request))

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        chat: Iterable[ChatMessage] | None = None,
        add_special_tokens: bool | None = None,
        with_pieces: bool = False,
        tenant: str | None = None,
        **chat_options: Unpack[ChatOptions],
    ) -> Tokenized:
        """Returns the tokens of a text or chat. A text may have up to four times as many tokens as the model's context.

        `tenant` and `chat_options` are those of `generate`. `add_special_tokens` says whether to add the special tokens
        that the tokenizer adds by itself; None adds them to a text only. `with_pieces` asks for the tokens' spelling
        too.
        """
        request = tokenize_request(
            prompt=prompt,
            chat=chat,
            add_special_tokens=add_special_tokens,
            with_pieces=with_pieces,
            tenant=tenant,
            chat_options=chat_options,
        )
        answer = await self._ask(lambda server: server.inference.Tokenize, request)
        return Tokenized(tuple(answer.token_ids), tuple(answer.pieces))

    async def detokenize(self, token_ids: Iterable[int], *, tenant: str | None = None) -> str:
        """Returns the text of these tokens. Special tokens appear in it by their names.

        `tenant` is that of `generate`.
        """
        request = detokenize_request(token_ids, tenant=tenant)
        answer = await self._ask(lambda server: server.inference.Detokenize, request)
        return str(answer.text)

    async def load(self) -> InferenceLoad:
        request = inference_pb2.GetInferenceLoadRequest()
        return inference_load_from_wire(await self._ask(lambda server: server.inference.GetLoad, request))

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> HealthStatus:
        """Asks a server for its health. `timeout_s` applies instead of the client's `rpc_timeout_s`, unless it is None.

        `service` "" asks whether the process lives, "baton.v1.Inference" whether it can serve requests. The answer for
        a name that the server does not know is UNKNOWN_SERVICE. Raises Unavailable if the server cannot be reached.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return health_from_wire(await self._ask(lambda server: server.health.Check, request, timeout_s))
        except NotFound:
            return HealthStatus.UNKNOWN_SERVICE

    async def close(self) -> None:
        """Cancels the open calls and closes the connections."""
        await self._servers.close()

    async def _ask(self, method_of: Callable[[Server], Any], request: Any, timeout_s: float | None = None) -> Any:
        """Calls a method of a server, and returns its answer. If the server is full, cannot be reached or sends no head
        of an answer in time, another one is asked. Raises BatonError.
        """
        in_all_s = self._rpc_timeout_s if timeout_s is None else bounded_s("timeout_s", timeout_s)
        give_up_s = time.monotonic() + in_all_s
        avoided: set[Server] = set()
        errors: dict[Server, BatonError] = {}
        while True:
            left_s = max(0.0, give_up_s - time.monotonic())
            server = await self._servers.take_when_ready(avoided=avoided, timeout_s=left_s)
            left_s = max(0.0, give_up_s - time.monotonic())
            try:
                call = method_of(server)(request, timeout=left_s)
                if left_s <= ANSWER_TIMEOUT_S or await _answers(call, ANSWER_TIMEOUT_S):
                    return await _only_answer(call)
                errors[server] = self._servers.note_hung(server, ANSWER_TIMEOUT_S)
                self._servers.avoid(server, avoided)
            except asyncio.CancelledError:
                if _is_task_cancelled():
                    raise
                raise Cancelled("the client is closed") from None
            except grpc.RpcError as failure:
                self._servers.pass_on(server, failure, avoided, errors)
            finally:
                self._servers.give_back(server)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _is_task_cancelled() -> bool:
    """Returns whether a CancelledError cancels the current task. (grpc.aio also raises it for a call that was cancelled
    here, such as by closing its stream or client.)
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _answers(call: Any, timeout_s: float) -> bool:
    """Waits until the head of the call's answer has come, or the call has failed. Returns False, and cancels the call,
    if neither happens in time. If this wait is cancelled, so is the call.
    """
    head = asyncio.ensure_future(call.initial_metadata())
    try:
        # The second wait is for a head that came while the event loop was busy with something else.
        for wait_s in (timeout_s, _BUSY_S):
            done, _ = await asyncio.wait((head,), timeout=wait_s)
            if done:
                await head
                return True
    except asyncio.CancelledError:
        call.cancel()
        raise
    finally:
        head.cancel()
    call.cancel()
    return False


async def _only_answer(call: Any) -> Any:
    """Returns the answer of a call that has one. Raises Internal if the server sends none, or another."""
    try:
        answer = await call.read()
        is_only = answer is not grpc.aio.EOF and await call.read() is grpc.aio.EOF
    finally:
        call.cancel()  # unless it has ended
    if not is_only:
        raise Internal(NOT_ONE_ANSWER, reason="PROTOCOL")
    return answer
