"""Checks the order of a generation's events on the client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.codec import event_from_wire
from baton.errors import Internal
from baton.events import (
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    PromptToken,
    Started,
)
from baton.v1 import inference_pb2
from common.grammar.reasoning import Reasoning
from common.text.output_formats import without_header


class EventOrder:
    """Passes a generation's events on, and raises Internal unless their order is Started, PromptLogprobs*, Delta*,
    Finished.
    """

    def __init__(self) -> None:
        self._has_started = False
        self._has_output = False
        self._has_finished = False

    @property
    def has_finished(self) -> bool:
        return self._has_finished

    def accept(self, message: inference_pb2.GenerateEvent) -> Event:
        event = event_from_wire(message)
        is_late = isinstance(event, PromptLogprobs) and self._has_output
        if self._has_finished or is_late or isinstance(event, Started) == self._has_started:
            raise Internal(f"the server sent {type(event).__name__} out of order", reason="PROTOCOL")
        self._has_started = True
        self._has_output = self._has_output or isinstance(event, Delta)
        self._has_finished = isinstance(event, Finished)
        return event

    def end(self) -> None:
        """Must be called when the stream has ended without an error status. Raises Internal if Finished is missing."""
        if not self._has_finished:
            raise Internal("the server ended the stream before it finished", reason="PROTOCOL")


class CompletionBuilder:
    """Collects the events of one generation into a Completion.

    `parse` turns the answer into the completion's `parsed`. It is called only if the model itself ended the output. The
    answer is the text after the reasoning, whose form `reasoning` describes; None means that there is no reasoning.
    """

    def __init__(self, parse: Callable[[str], Any] | None = None, *, reasoning: Reasoning | None = None) -> None:
        self._parse = parse
        self._reasoning = reasoning
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_logprobs: list[PromptToken] = []
        self._logprobs: list[PositionLogprobs] = []
        self._started: Started | None = None

    def add(self, event: Event) -> Completion | None:
        """Adds an event. Returns the completion if `event` is Finished, else None.

        Raises what `parse` raises.
        """
        match event:
            case Started():
                self._started = event
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.tokens)
            case Delta():
                self._text.append(event.text)
                self._token_ids.extend(event.token_ids)
                self._logprobs.extend(event.logprobs)
            case Finished():
                assert self._started is not None
                text = "".join(self._text)
                answer = text
                if self._reasoning is not None:
                    answer = replace(self._reasoning, is_open=self._started.is_reasoning_open).answer_in(text)
                is_whole = event.reason is FinishReason.EOS
                return Completion(
                    request_id=self._started.request_id,
                    seed=self._started.seed,
                    text=text,
                    token_ids=tuple(self._token_ids),
                    prompt_logprobs=tuple(self._prompt_logprobs),
                    logprobs=tuple(self._logprobs),
                    finish_reason=event.reason,
                    matched_stop=event.matched_stop,
                    usage=event.usage,
                    timings=event.timings,
                    speculation=event.speculation,
                    parsed=self._parse(without_header(answer)) if is_whole and self._parse is not None else None,
                )
        return None
