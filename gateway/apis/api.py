"""Describes the parts in which generating endpoints differ, fields and answer, and counts a request's tokens for the
answer's usage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.events import Delta, Event, Finished, Started
from common.telemetry.stats import SpeculationCounts
from gateway.errors import ApiError
from gateway.fields import RequestFields
from gateway.plan import Plan
from gateway.sending import ServerEvent
from gateway.served_model import ModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request whose generations have all been admitted. `started` has the first event of each.

    `tally` counts each event before the answer gets it.
    """

    plan: Plan
    card: ModelCard
    request_id: str
    created_s: int
    started: Sequence[Started]
    tally: Tally


class Answer(Protocol):
    """Makes the answer to one request from the events of its generations: the events of a stream, or one JSON object.

    It gets every event in the order of arrival, whether the answer is streamed or not.
    """

    def opening(self) -> Sequence[ServerEvent]:
        """Returns what a stream begins with, before the first token."""

    def add(self, index: int, event: Event) -> Sequence[ServerEvent]:
        """Takes the next event of generation `index`, and returns the stream's events for it."""

    def ending(self) -> Sequence[ServerEvent]:
        """Returns what a stream ends with, once all generations have finished."""

    def failing(self, error: ApiError) -> Sequence[ServerEvent]:
        """Returns what a stream ends with if the request fails."""

    def whole(self) -> Mapping[str, Any]:
        """Returns the JSON object, once all generations have finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """Describes a generating endpoint.

    `parse` turns a request's body, which has `fields`, into a plan, or raises ApiError. `begin` makes the answer to an
    admitted request. With `parses_output`, the output text also shows the format's markers that are special tokens.
    With `repeats_streams`, a stream's last event repeats the whole answer, with log-probabilities.
    """

    path: str
    fields: type[RequestFields]
    parse: Callable[[bytes], Plan]
    parses_output: bool
    repeats_streams: bool = False
    begin: Callable[[Admitted], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The tokens of all generations of a request.

    A prompt's tokens count once, however many generations it has. A prompt token counts as cached if it was cached for
    every generation of the prompt. Cached tokens, reasoning and drafts are those of generations that have ended.
    """

    num_prompt: int
    num_cached: int
    num_completion: int
    num_reasoning: int
    num_drafted: int
    num_accepted: int
    num_forced: int

    @property
    def drafts(self) -> dict[str, int]:
        """The numbers of drafts, by their names in an answer's usage."""
        return {
            "draft_tokens": self.num_drafted,
            "accepted_draft_tokens": self.num_accepted,
            "forced_draft_tokens": self.num_forced,
        }


class Tally:
    """Counts tokens while a request's generations run. `started` has the first event of each generation."""

    def __init__(self, plan: Plan, started: Sequence[Started]) -> None:
        self._best_of = plan.best_of
        self._num_prompt = sum(each.num_prompt_tokens for each in started[:: plan.best_of])
        self._num_completion = [0] * len(started)
        self._num_cached = [0] * len(started)
        self._num_reasoning = [0] * len(started)
        self._drafts: list[SpeculationCounts] = []

    def add(self, index: int, event: Event) -> None:
        """Counts the next event of the generation with this index."""
        match event:
            case Delta():
                self._num_completion[index] += len(event.token_ids)
            case Finished():
                self._num_completion[index] = event.usage.num_completion_tokens
                self._num_cached[index] = event.timings.num_cached_tokens
                self._num_reasoning[index] = event.usage.num_reasoning_tokens
                if event.speculation is not None:
                    self._drafts.append(event.speculation)

    @property
    def counts(self) -> TokenCounts:
        size, cached = self._best_of, self._num_cached
        return TokenCounts(
            num_prompt=self._num_prompt,
            num_cached=sum(min(cached[first : first + size]) for first in range(0, len(cached), size)),
            num_completion=sum(self._num_completion),
            num_reasoning=sum(self._num_reasoning),
            num_drafted=sum(each.num_drafted_tokens for each in self._drafts),
            num_accepted=sum(each.num_accepted_tokens for each in self._drafts),
            num_forced=sum(each.num_forced_tokens for each in self._drafts),
        )
