"""Counts the tokens of one HTTP request, for its answer's usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.events import Delta, Event, Finished, Started
from common.telemetry.stats import SpeculationCounts
from gateway.plan import Plan


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
