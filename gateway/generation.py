"""Answers requests to OpenAI's generating endpoints.

body ─▶ Api.parse ─▶ Plan ─▶ Choices (Generate calls) ─▶ Choice chunks ─▶ events, or one JSON object
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Unpack

import structlog
from starlette.types import Receive, Send

from baton import AsyncClient, Completion, Reasoning
from baton.client import AsyncEventStream
from baton.client.event_order import CompletionBuilder
from baton.errors import BatonError
from baton.events import Delta, Event, Finished, PromptLogprobs, Started
from baton.requests import SamplingOptions
from common.request_stats import SpeculationCounts
from gateway.answer import Api, Choice, Envelope, best, usage
from gateway.choices import Choices, IndexedEvent
from gateway.errors import ApiError, api_error_of, internal, invalid
from gateway.metrics import GatewayMetrics
from gateway.open_requests import OpenRequest
from gateway.plan import Plan
from gateway.post_endpoint import PostEndpoint, PostParts
from gateway.prompt_bounds import check_prompt_logprobs, check_prompts
from gateway.receiving import unless_left
from gateway.request_record import RequestRecord
from gateway.responses import EventStreamWriter, JsonResponse
from gateway.served_model import ModelCard

_log = structlog.get_logger(__name__)


class GenerationEndpoint(PostEndpoint):
    """The ASGI application of one generating endpoint. When a client leaves, all calls of its request are cancelled."""

    def __init__(
        self,
        api: Api,
        *,
        client: AsyncClient,
        unix_time: Callable[[], float] = time.time,
        **common: Unpack[PostParts],
    ) -> None:
        super().__init__(**common)
        self._api = api
        self._client = client
        self._unix_time = unix_time

    async def _answer(
        self, body: bytes, open_request: OpenRequest, record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        plan = self._parse(body)
        async with open_request.ends_when_failed():
            card = await self._card(receive)
        card.check(plan.model)
        check_prompts(plan, card)
        try:
            async with Choices(plan.num_generations, self._opener(plan, card, record)) as choices:
                open_request.fails_by(choices.fail)
                answering = _Answering(self._api, plan, card, self._unix_time(), record, self._metrics)
                work = answering.stream(choices, send) if plan.is_streamed else answering.whole(choices, send)
                await unless_left(receive, work)
        except BatonError as error:
            raise api_error_of(error, plan.params) from None

    def _parse(self, body: bytes) -> Plan:
        plan = self._api.parse(body)
        if plan.num_generations > self._limits.max_choices:
            param = "best_of" if plan.best_of > plan.n else "n" if plan.n > 1 else "prompt"
            raise invalid(param, f"{plan.num_generations} choices are more than {self._limits.max_choices}")
        return plan

    def _opener(self, plan: Plan, card: ModelCard, record: RequestRecord) -> Callable[[int], AsyncEventStream]:
        """Returns a function that starts the Generate call of a choice, given the choice's index.

        Each call's id extends the request's id by random digits and the index: callers may send the same x-request-id
        twice, but the ids of live calls must differ. The choices of a prompt go to one decode service, where they share
        its KV, unless they may not share any.
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
        further: SamplingOptions = {**sampling, "prompt_logprobs": None}  # those of a prompt come for its first choice
        firsts: dict[int, AsyncEventStream] = {}

        def open_stream(index: int) -> AsyncEventStream:
            prompt, choice_index = divmod(index, plan.best_of)
            stream = self._client.generate(
                **plan.prompts[prompt].arguments,
                request_id=f"{prefix}-{index}",
                choice_index=choice_index,
                cache_salt=plan.cache_salt,
                cache_prompt=plan.cache_prompt,
                truncate_prompt_tokens=plan.truncate_prompt_tokens,
                same_server_as=None if plan.cache_prompt is False else firsts.get(prompt),
                timeout_s=self._limits.request_timeout_s,
                **(sampling if choice_index == 0 else further),
            )
            firsts.setdefault(prompt, stream)
            return stream

        return open_stream


class _Answering:
    """Writes the answer to one parsed request, from the events of its calls."""

    def __init__(
        self, api: Api, plan: Plan, card: ModelCard, unix_s: float, record: RequestRecord, metrics: GatewayMetrics
    ) -> None:
        self._api = api
        self._plan = plan
        self._record = record
        self._metrics = metrics
        self._form = card.output_format
        self._choices: list[Choice] = []
        self._num_tokens = [0] * plan.num_generations
        self._num_cached = [0] * plan.num_generations
        self._num_reasoning = [0] * plan.num_generations
        self._drafts: list[SpeculationCounts] = []
        self._envelope = Envelope(
            id=f"{api.id_prefix}-{record.request_id}",
            created=int(unix_s),
            model=card.name,
            system_fingerprint=card.system_fingerprint,
        )
        record.num_choices = plan.num_choices

    async def whole(self, choices: Choices, send: Send) -> None:
        """Waits for all choices and sends one JSON object.

        Raises BatonError or ApiError if the request fails; then nothing has been sent.
        """
        started = await self._started(choices)
        check_prompt_logprobs(self._plan, self._record.num_prompt_tokens)
        builders = [CompletionBuilder() for _ in started]
        for builder, first in zip(builders, started, strict=True):
            builder.add(first)
        completions: dict[int, Completion] = {}
        async for index, event in choices:
            self._count(index, event)
            if (completion := builders[index].add(event)) is not None:
                completions[index] = completion
        best_of = self._plan.best_of
        of_prompts = [completions[first].prompt_logprobs for first in range(0, len(builders), best_of)]
        ended = [
            replace(completions[index], prompt_logprobs=of_prompts[index // best_of]) for index in range(len(builders))
        ]
        answer = self._envelope.around(
            self._api.whole_object,
            [choice.whole(each) for choice, each in zip(self._choices, best(ended, self._plan), strict=True)],
            usage=self._usage(started),
            **self._api.of_prompt(self._plan, completions[0]),
        )
        await JsonResponse(answer).send_to(send)

    async def stream(self, choices: Choices, send: Send) -> None:
        """Sends the answer as server-sent events.

        An error before the first event is raised as by `whole`. A later error is sent as the last event.
        """
        started = await self._started(choices)
        writer = EventStreamWriter(send)
        await writer.begin()
        try:
            for choice in self._choices:
                if (opening := choice.opening()) is not None:
                    await writer.write(self._chunk(opening, started))
            async for index, event in self._with_prompts(choices):
                self._count(index, event)
                if (part := self._part(index, event)) is not None:
                    await writer.write(self._chunk(part, started))
            if self._plan.includes_usage:
                await writer.write(self._envelope.around(self._api.chunk_object, [], usage=self._usage(started)))
        except Exception as failure:
            error = self._api_error(failure)
            self._record.status, self._record.error = error.status, error
            await writer.break_off(error)
            return
        await writer.end()

    def _api_error(self, failure: Exception) -> ApiError:
        match failure:
            case ApiError():
                return failure
            case BatonError():
                return api_error_of(failure, self._plan.params)
        _log.error("answer_crashed", request_id=self._record.request_id, exc_info=failure)
        return internal()

    async def _started(self, choices: Choices) -> Sequence[Started]:
        started = await choices.started()
        self._record.num_prompt_tokens = sum(each.num_prompt_tokens for each in started[:: self._plan.best_of])
        self._metrics.on_prompt(self._record.num_prompt_tokens)
        plan = self._plan
        self._choices = [
            self._api.new_choice(index, plan, self._form, started[index // plan.n * plan.best_of + index % plan.n])
            for index in range(plan.num_choices)
        ]
        return started

    async def _with_prompts(self, choices: Choices) -> AsyncIterator[IndexedEvent]:
        """Yields the events of all choices.

        Only the first choice of a prompt has the prompt's log-probabilities. Each of them is yielded for all choices of
        the prompt, and what the others send before the last of them is kept back until then.
        """
        n = self._plan.n
        has_some = self._plan.sampling.get("prompt_logprobs") is not None
        kept: dict[int, list[IndexedEvent]] = {first: [] for first in range(0, len(self._choices), n) if has_some}
        async for index, event in choices:
            first = index - index % n
            if isinstance(event, PromptLogprobs):
                for each in range(first, first + n):
                    yield each, event
            elif index != first and first in kept:
                kept[first].append((index, event))
            else:
                yield index, event
                for other in kept.pop(first, ()):
                    yield other

    def _part(self, index: int, event: Event) -> dict[str, object] | None:
        match event:
            case PromptLogprobs():
                return self._choices[index].prompt(event)
            case Delta():
                return self._choices[index].part(event)
            case Finished():
                return self._choices[index].ending(event)
        return None

    def _chunk(self, choice: dict[str, object], started: Sequence[Started]) -> dict[str, object]:
        more: dict[str, object] = {"usage": None} if self._plan.includes_usage else {}
        if self._plan.has_usage_in_chunks:
            more = {"usage": self._usage(started)}
        return self._envelope.around(self._api.chunk_object, [choice], **more)

    def _usage(self, started: Sequence[Started]) -> dict[str, object]:
        return usage(self._plan, started, self._num_tokens, self._num_cached, self._num_reasoning, self._drafts)

    def _count(self, index: int, event: Event) -> None:
        record = self._record
        if isinstance(event, Finished):
            self._num_tokens[index] = event.usage.num_completion_tokens
            self._num_cached[index] = event.timings.num_cached_tokens
            self._num_reasoning[index] = event.usage.num_reasoning_tokens
            if event.speculation is not None:
                self._drafts.append(event.speculation)
        if not isinstance(event, Delta):
            return
        if record.ttft_s is None:
            record.ttft_s = record.elapsed_s
            self._metrics.on_first_token(route=record.route, seconds=record.ttft_s)
        self._num_tokens[index] += len(event.token_ids)
        record.num_completion_tokens += len(event.token_ids)
        self._metrics.on_tokens(len(event.token_ids))
