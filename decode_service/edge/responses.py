"""Converts the edge's values to `baton.v1` messages, and writes these to clients' streams."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from baton.v1 import inference_pb2, types_pb2
from common.errors import RequestCancelled
from common.sampling.params import NUMBER_OPTIONS, ResolvedSampling
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.stats import PoolCounts
from common.text.tokenizer import TokenDecoder
from decode_service.edge.live_request import Ending
from decode_service.edge.text.output import NewOutput, OutputLogprobs
from decode_service.messages import FinishReason

_REASONS = {reason: inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}


def started_event(
    request_id: str, num_prompt_tokens: int, sampling: ResolvedSampling, *, prompt_token_ids: Sequence[int] = ()
) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(
        started=inference_pb2.Started(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            prompt_token_ids=prompt_token_ids,
            seed=sampling.seed,
            is_reasoning_open=sampling.reasoning is not None and sampling.reasoning.is_open is True,
            sampling=types_pb2.SamplingParams(**{name: getattr(sampling, name) for name in NUMBER_OPTIONS}),
        )
    )


def delta_event(new: NewOutput) -> inference_pb2.GenerateEvent:
    event = inference_pb2.GenerateEvent()
    delta = event.delta
    delta.token_ids.extend(new.token_ids)
    delta.text = new.text
    if new.logprobs:
        positions = zip(new.token_ids, new.logprobs, strict=True)
        delta.logprobs.extend(_position_logprobs(token_id, position) for token_id, position in positions)
    return event


class PromptTokens:
    """Makes the events with the tokens of a prompt and their log-probabilities, from the first token on, in order."""

    def __init__(self, decoder: TokenDecoder, token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._token_ids = token_ids
        self._begins_text = True

    def first(self) -> inference_pb2.GenerateEvent:
        """Returns the event of the first token, which has no log-probability."""
        token_id = self._token_ids[0]
        token = inference_pb2.PromptToken(token_id=token_id, token=self._bytes_of(token_id))
        self._pass(token_id)
        return inference_pb2.GenerateEvent(prompt_logprobs=inference_pb2.PromptLogprobs(tokens=[token]))

    def event(self, logprobs: PromptLogprobs) -> inference_pb2.GenerateEvent:
        """Returns the event of the next tokens, those of `logprobs`."""
        event = inference_pb2.GenerateEvent()
        event.prompt_logprobs.start = logprobs.start
        columns = (logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_values)
        token_ids = self._token_ids[logprobs.start : logprobs.stop]
        for token_id, own, rank, top_ids, values in zip(token_ids, *(each.tolist() for each in columns), strict=True):
            top = [
                types_pb2.TokenLogprob(token_id=top_id, logprob=value, token=self._bytes_of(top_id))
                for top_id, value in zip(top_ids, values, strict=True)
            ]
            token = self._bytes_of(token_id)
            event.prompt_logprobs.tokens.add(token_id=token_id, token=token, logprob=own, rank=rank, top=top)
            self._pass(token_id)
        return event

    def _bytes_of(self, token_id: int) -> bytes:
        return self._decoder.bytes_of(token_id, begins_text=self._begins_text)

    def _pass(self, token_id: int) -> None:
        self._begins_text = self._begins_text and self._decoder.is_skipped(token_id)


def finished_event(ending: Ending) -> inference_pb2.GenerateEvent:
    finished = inference_pb2.Finished(
        reason=_REASONS[ending.reason],
        usage=inference_pb2.Usage(
            num_prompt_tokens=ending.num_prompt_tokens,
            num_completion_tokens=ending.num_completion_tokens,
            num_reasoning_tokens=ending.num_reasoning_tokens,
        ),
        timings=inference_pb2.Timings(**dataclasses.asdict(ending.timings)),
    )
    if ending.speculation is not None:
        finished.speculation.CopyFrom(inference_pb2.SpeculationCounts(**dataclasses.asdict(ending.speculation)))
    if ending.stop_string is not None:
        finished.stop_string = ending.stop_string
    elif ending.stop_token_id is not None:
        finished.stop_token_id = ending.stop_token_id
    return inference_pb2.GenerateEvent(finished=finished)


def pool_load(counts: PoolCounts) -> types_pb2.PoolLoad:
    return types_pb2.PoolLoad(**dataclasses.asdict(counts))


def _position_logprobs(token_id: int, position: OutputLogprobs) -> types_pb2.PositionLogprobs:
    logprobs = position.logprobs
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=token_id, logprob=logprobs.chosen, token=position.token),
        top=[
            types_pb2.TokenLogprob(token_id=top_id, logprob=value, token=token)
            for top_id, value, token in zip(logprobs.top_ids, logprobs.top_values, position.top_tokens, strict=True)
        ],
    )


class ClientWrites:
    """Writes a client's stream with a time-out for slow clients. One task makes all writes, inside a `with` block.

    A single timer watches all writes and is set again when it fires, because a timer for each write would cost as much
    as the write itself.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], *, stall_timeout_s: float) -> None:
        self._context = context
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._began_s: float | None = None
        self._has_stalled = False
        self._timer = self._loop.call_later(stall_timeout_s, self._look)

    async def write(self, event: inference_pb2.GenerateEvent) -> None:
        """Writes one event. Raises RequestCancelled if the client reads nothing for `stall_timeout_s`."""
        self._began_s = self._loop.time()
        try:
            await self._context.write(event)
        except asyncio.CancelledError:
            if not self._has_stalled or self._task.uncancel():
                raise
            raise RequestCancelled(f"the client read nothing for {self._stall_timeout_s} s") from None
        finally:
            self._began_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._began_s is None else self._began_s) + self._stall_timeout_s
        if due_s > now_s:
            self._timer = self._loop.call_at(due_s, self._look)
            return
        self._has_stalled = True
        self._task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
