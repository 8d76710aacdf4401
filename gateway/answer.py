"""The parts of an answer that completions and chat completions share, and the interface for the parts that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol

from baton.events import Completion, Delta, Finished, FinishReason, PromptLogprobs, Started
from common.request_stats import SpeculationCounts
from common.text.output_formats import OutputFormat
from gateway.plan import Plan


class Choice(Protocol):
    """Builds the JSON of one choice of an answer, as chunks of a stream or whole."""

    def opening(self) -> dict[str, Any] | None:
        """Returns the chunk that comes before the first token, or None if there is none."""

    def prompt(self, event: PromptLogprobs) -> dict[str, Any] | None:
        """Returns the chunk for tokens of the prompt, or None if the request does not ask for them in its stream."""

    def part(self, delta: Delta) -> dict[str, Any] | None:
        """Returns the chunk for a piece of output, or None if it has nothing that the request asked for."""

    def ending(self, finished: Finished) -> dict[str, Any]:
        """Returns the last chunk. It has what `part` held back."""

    def whole(self, completion: Completion) -> dict[str, Any]:
        """Returns the whole choice, for a request that is not streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """Describes one of OpenAI's generating endpoints. `parse` turns a request's body into a plan, or raises ApiError.

    `new_choice` gets the choice's index, the plan, the format of the model's output, and the choice's first event. If
    the endpoint `parses_output`, the text has the format's markers that are special tokens. `of_prompt`
    returns the answer's fields about its one prompt, given the completion of the first choice.
    """

    path: str
    id_prefix: str
    whole_object: str
    chunk_object: str
    parse: Callable[[bytes], Plan]
    parses_output: bool
    new_choice: Callable[[int, Plan, OutputFormat, Started], Choice]
    of_prompt: Callable[[Plan, Completion], Mapping[str, Any]] = lambda plan, completion: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The JSON fields around the choices of an answer. They are the same in all chunks of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def around(self, kind: str, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            **more,
        }


def finish_reason(reason: FinishReason) -> str:
    """Returns OpenAI's name for a finish reason."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def with_token_ids(choice: dict[str, Any], token_ids: Sequence[int], plan: Plan) -> dict[str, Any]:
    return {**choice, "token_ids": list(token_ids)} if plan.returns_token_ids else choice


def best(completions: Sequence[Completion], plan: Plan) -> list[Completion]:
    """Returns the completions of the plan's choices, in their order, from those of all its generations.

    The best have the largest mean log-probability of a token; of equals, the earlier generation counts.
    """
    chosen: list[Completion] = []
    for first in range(0, plan.num_generations, plan.best_of):
        group = completions[first : first + plan.best_of]
        chosen += group if plan.best_of == plan.n else sorted(group, key=_mean_logprob, reverse=True)[: plan.n]
    return [replace(each, logprobs=()) for each in chosen] if plan.hides_logprobs else chosen


def _mean_logprob(completion: Completion) -> float:
    mean = fmean([each.chosen.logprob for each in completion.logprobs] or [-math.inf])
    return -math.inf if math.isnan(mean) else mean


def usage(
    plan: Plan,
    started: Sequence[Started],
    num_completion_tokens: Sequence[int],
    num_cached_tokens: Sequence[int],
    num_reasoning_tokens: Sequence[int],
    drafts: Iterable[SpeculationCounts],
) -> dict[str, object]:
    """Returns OpenAI's `usage` object. A prompt's tokens count once, however many choices the prompt has.

    The numbers of tokens have one entry per generation. A prompt token counts as cached if it was cached for every
    generation of the prompt. `drafts` are the counts of generations that have ended.
    """
    counts, size = list(drafts), plan.best_of
    num_prompt = sum(each.num_prompt_tokens for each in started[::size])
    num_completion = sum(num_completion_tokens)
    num_cached = sum(min(num_cached_tokens[first : first + size]) for first in range(0, plan.num_generations, size))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(num_reasoning_tokens),
            "draft_tokens": sum(each.num_drafted_tokens for each in counts),
            "accepted_draft_tokens": sum(each.num_accepted_tokens for each in counts),
        },
    }
