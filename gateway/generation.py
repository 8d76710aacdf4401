"""Answers requests to the generating endpoints.

body ─▶ Api.parse ─▶ Plan ─▶ Choices ─▶ Answer ─▶ events of a stream, or one JSON object

Generate call 0 ─▶ reader ─┐
Generate call 1 ─▶ reader ─┼─▶ queue of one ─▶ (index, event), in the order of arrival
Generate call 2 ─▶ reader ─┘

Each choice is one Generate call, and all are read at the same time. A reader waits while the queue is full. If the
client takes nothing, gRPC's flow control therefore stops the calls.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, Unpack

import structlog
from starlette.types import Receive, Send

from baton import AsyncClient, Reasoning
from baton.client import AsyncEventStream
from baton.errors import BatonError
from baton.events import Delta, Event, Finished, Started
from baton.requests import SamplingOptions
from gateway.apis.api import Admitted, Answer, Api, Tally
from gateway.errors import ApiError, api_error_of, internal, invalid
from gateway.limits import KeptLogprobs, check_prompts
from gateway.open_requests import OpenRequest, OpenRequests
from gateway.plan import Plan
from gateway.post_endpoint import PostEndpoint, PostParts, unless_left
from gateway.request_record import GatewayMetrics, HttpRecord
from gateway.sending import EventStreamWriter, JsonResponse
from gateway.served_model import ModelCard

FREE_REPEATED_BYTES = 64 << 10
"""How many bytes of the request, as JSON, an answer may repeat without counting as kept memory."""
_REPEATED_SIZE = 16  # measured: 3 bytes of objects for each byte of a common schema, 18 if it has empty objects only

_log = structlog.get_logger(__name__)


class GenerationEndpoint(PostEndpoint):
    """The ASGI application of one generating endpoint. When a client leaves, all calls of its request are cancelled."""

    def __init__(
        self,
        api: Api,
        *,
        client: AsyncClient,
        **common: Unpack[PostParts],
    ) -> None:
        super().__init__(**common)
        self._api = api
        self._client = client

    async def _answer(
        self, body: bytes, open_request: OpenRequest, record: HttpRecord, receive: Receive, send: Send
    ) -> None:
        plan = self._parse(body)
        async with open_request.ends_when_failed():
            card = await self._card(receive)
        card.check(plan.model)
        plan = plan.served_by(card, record.ignored)
        check_prompts(plan, card)
        async with Choices(plan, self._opener(plan, card, record)) as choices:
            open_request.fails_by(choices.fail)
            answering = _Answering(self._api, plan, card, time.time(), record, self._metrics, self._open_requests)
            work = answering.stream(choices, send) if plan.is_streamed else answering.whole(choices, send)
            await unless_left(receive, work)

    def _parse(self, body: bytes) -> Plan:
        plan = self._api.parse(body)
        if plan.num_generations > self._limits.max_choices:
            param = "best_of" if plan.best_of > plan.n else "n" if plan.n > 1 else "prompt"
            raise invalid(param, f"{plan.num_generations} choices are more than {self._limits.max_choices}")
        return plan

    def _opener(self, plan: Plan, card: ModelCard, record: HttpRecord) -> Callable[[int], AsyncEventStream]:
        """Returns a function that starts the Generate call of a choice, given the choice's index.

        Each call's id extends the request's id by random digits and the index: callers may send the same x-request-id
        twice, but the ids of live calls must differ. The choices of a prompt go to one decode service and share the
        prompt's KV there, unless `cache_prompt` is false.
        """
        prefix = f"{record.request_id}-{uuid.uuid4().hex[:8]}"
        sampling = plan.sampling.copy()
        if self._api.parses_output:
            form = card.output_format
            sampling["shown_special_tokens"] = form.markers
            if form.reasoning is not None:
                sampling["reasoning"] = Reasoning(
                    form.reasoning.opens, form.reasoning.closes, max_tokens=plan.max_reasoning_tokens
                )
        further: SamplingOptions = {**sampling, "prompt_logprobs": None}  # each prompt's come with its first choice
        firsts: dict[int, AsyncEventStream] = {}

        def open_stream(index: int) -> AsyncEventStream:
            prompt, choice_index = divmod(index, plan.best_of)
            stream = self._client.generate(
                **plan.prompts[prompt].arguments,
                request_id=f"{prefix}-{index}",
                choice_index=choice_index,
                priority=plan.priority,
                tenant=record.client or None,
                cache_salt=plan.cache_salt,
                cache_prompt=plan.cache_prompt,
                truncate_prompt_tokens=plan.truncate_prompt_tokens,
                return_prompt_token_ids=plan.returns_token_ids or None,
                same_server_as=None if plan.cache_prompt is False else firsts.get(prompt),
                timeout_s=self._limits.request_timeout_s,
                **(sampling if choice_index == 0 else further),
            )
            firsts.setdefault(prompt, stream)
            return stream

        return open_stream


class _Answering:
    """Sends the answer to one parsed request, from the events of its calls."""

    def __init__(
        self,
        api: Api,
        plan: Plan,
        card: ModelCard,
        unix_s: float,
        record: HttpRecord,
        metrics: GatewayMetrics,
        open_requests: OpenRequests,
    ) -> None:
        self._api = api
        self._plan = plan
        self._card = card
        self._created_s = int(unix_s)
        self._record = record
        self._metrics = metrics
        self._open_requests = open_requests
        record.num_choices = plan.num_choices

    async def whole(self, choices: Choices, send: Send) -> None:
        """Waits for all choices and sends one JSON object.

        Raises ApiError if the request fails; then nothing has been sent.
        """
        answer, tally = await self._begin(choices)
        with self._keeping() as kept:
            kept.add_prompts(self._record.num_prompt_tokens)
            async for index, event in choices:
                self._count(event)
                kept.add(event)
                tally.add(index, event)
                answer.add(index, event)
            await JsonResponse(answer.whole()).send_to(send)

    async def stream(self, choices: Choices, send: Send) -> None:
        """Sends the answer as server-sent events.

        An error before the status is sent, when every choice is admitted, is raised as by `whole`. A later one becomes
        the stream's last event.
        """
        answer, tally = await self._begin(choices)
        writer = EventStreamWriter(send)
        with self._keeping() as kept:
            await writer.begin()
            try:
                await writer.write(answer.opening())
                async for index, event in choices:
                    self._count(event)
                    if self._api.repeats_streams:
                        kept.add(event)
                    tally.add(index, event)
                    await writer.write(answer.add(index, event))
                last = answer.ending()
            except Exception as failure:
                error = self._api_error(failure)
                self._record.status, self._record.error = error.status, error
                last = answer.failing(error)
            await writer.end(last)

    @contextmanager
    def _keeping(self) -> Iterator[KeptLogprobs]:
        """Holds memory for what the answer keeps until it ends. Raises ApiError 429 if none is left."""
        with self._open_requests.keeping(self._record.client) as hold:
            hold(_REPEATED_SIZE * max(0, self._plan.num_repeated_bytes - FREE_REPEATED_BYTES))
            yield KeptLogprobs(self._plan, hold)

    def _api_error(self, failure: Exception) -> ApiError:
        if isinstance(failure, ApiError):
            return failure
        _log.error("answer_crashed", request_id=self._record.request_id, exc_info=failure)
        return internal()

    async def _begin(self, choices: Choices) -> tuple[Answer, Tally]:
        started = await choices.started()
        tally = Tally(self._plan, started)
        self._record.num_prompt_tokens = tally.counts.num_prompt
        self._metrics.on_prompt(self._record.num_prompt_tokens)
        admitted = Admitted(
            plan=self._plan,
            card=self._card,
            request_id=self._record.request_id,
            created_s=self._created_s,
            started=started,
            tally=tally,
        )
        return self._api.begin(admitted), tally

    def _count(self, event: Event) -> None:
        record = self._record
        if not isinstance(event, Delta):
            return
        if record.ttft_s is None:
            record.ttft_s = record.elapsed_s
            self._metrics.on_first_token(route=record.route, seconds=record.ttft_s)
        record.num_completion_tokens += len(event.token_ids)
        self._metrics.on_tokens(len(event.token_ids))


IndexedEvent = tuple[int, Event]


class Choices(AsyncIterator[IndexedEvent]):
    """The events of all choices of one request, as (index of the choice, event).

    Use it with `async with`; leaving the block cancels open calls. The first choice that fails ends all of them.
    """

    def __init__(self, plan: Plan, open_stream: Callable[[int], AsyncEventStream]) -> None:
        """Prepares the choices. `open_stream(index)` starts one choice's generation; its errors are raised when the
        block is entered. All errors are ApiErrors.
        """
        self._plan = plan
        self._open_stream = open_stream
        self._streams: list[AsyncEventStream] = []
        self._place: asyncio.Queue[IndexedEvent | ApiError] = asyncio.Queue(maxsize=1)
        self._failure: ApiError | None = None
        self._all_started = asyncio.Event()
        self._num_open = self._num_choices = plan.num_generations
        self._readers: list[asyncio.Task[None]] = []

    async def started(self) -> tuple[Started, ...]:
        """Returns each choice's Started event once all are admitted. It reads no further event.

        Raises the error of a choice that was not admitted.
        """
        started: dict[int, Started] = {}
        while len(started) < self._num_choices:
            index, event = await self._next()
            assert isinstance(event, Started)
            started[index] = event
        self._all_started.set()
        return tuple(started[index] for index in range(self._num_choices))

    async def __anext__(self) -> IndexedEvent:
        """Returns the next event of any choice, with the choice's index. Call it after `started`. The iteration ends
        when every choice has finished.

        Raises the error of the first choice that fails, or the error given to `fail`.
        """
        if self._num_open == 0:
            raise StopAsyncIteration
        index, event = await self._next()
        if isinstance(event, Finished):
            self._num_open -= 1
        return index, event

    def fail(self, error: ApiError) -> None:
        """Ends all choices. The next call that reads an event raises `error`."""
        self._end_with(error)

    async def _next(self) -> IndexedEvent:
        if self._failure is not None:
            raise self._failure
        item = await self._place.get()
        if isinstance(item, ApiError):
            raise item
        return item

    async def _read(self, index: int, stream: AsyncEventStream) -> None:
        try:
            await self._place.put((index, await anext(stream)))
            await self._all_started.wait()
            async for event in stream:
                await self._place.put((index, event))
        except BatonError as error:
            self._end_with(self._api_error(index, error))
        except Exception:
            _log.exception("choice_crashed", index=index)
            self._end_with(internal())

    def _api_error(self, index: int, error: BatonError) -> ApiError:
        return api_error_of(error, self._plan.params_of(index // self._plan.best_of))

    def _end_with(self, error: ApiError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        while not self._place.empty():
            self._place.get_nowait()
        self._place.put_nowait(error)  # wakes a caller that is waiting for an event

    async def __aenter__(self) -> Self:
        try:
            for index in range(self._num_choices):
                try:
                    self._streams.append(self._open_stream(index))
                except BatonError as error:
                    raise self._api_error(index, error) from None
                await asyncio.sleep(0)  # lets other requests run between the calls, because each call copies its prompt
        except BaseException:
            await self._close()
            raise
        self._readers = [asyncio.create_task(self._read(index, each)) for index, each in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for stream in self._streams:
            await stream.aclose()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
