"""The answers of chat completions and completions: lists of choices, in chunks of a stream or whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Protocol

from baton.client.generation import CompletionBuilder
from baton.events import Completion, Delta, Event, Finished, FinishReason, PromptLogprobs, Started
from common.text.output_formats import OutputFormat
from gateway.apis.api import Admitted, TokenCounts
from gateway.errors import ApiError, openai_error
from gateway.plan import Plan
from gateway.sending import ServerEvent

DONE = ServerEvent("[DONE]")


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


class ChoicesAnswer:
    """An Answer with choices.

    `new_choice` gets the choice's index, the plan, the format of the model's output, and the choice's first event.
    `of_prompt` returns the answer's fields about its one prompt, given the completion of the first choice. With
    `has_one_prompt`, the prompt's token ids are a field of the answer, and else of each choice.
    """

    def __init__(
        self,
        admitted: Admitted,
        *,
        id_prefix: str,
        whole_object: str,
        chunk_object: str,
        new_choice: Callable[[int, Plan, OutputFormat, Started], Choice],
        of_prompt: Callable[[Plan, Completion], Mapping[str, Any]] = lambda plan, completion: {},
        has_one_prompt: bool = False,
    ) -> None:
        plan, started, card = admitted.plan, admitted.started, admitted.card
        self._plan = plan
        self._tally = admitted.tally
        self._id = f"{id_prefix}-{admitted.request_id}"
        self._envelope = {
            "created": admitted.created_s,
            "model": card.name,
            "system_fingerprint": card.system_fingerprint,
        }
        self._whole_object = whole_object
        self._chunk_object = chunk_object
        self._of_prompt = of_prompt
        self._has_one_prompt = has_one_prompt
        self._prompt_ids = {
            index: list(started[index // plan.n * plan.best_of].prompt_token_ids)
            for index in range(plan.num_choices if plan.returns_token_ids else 0)
        }  # by choice; a stream tells each once
        self._choices = [
            new_choice(index, plan, card.output_format, started[index // plan.n * plan.best_of + index % plan.n])
            for index in range(plan.num_choices)
        ]
        self._builders = [CompletionBuilder() for _ in started]
        for builder, first in zip(self._builders, started, strict=True):
            builder.add(first)
        self._completions: dict[int, Completion] = {}
        has_prompts = plan.sampling.get("prompt_logprobs") is not None
        firsts = range(0, plan.num_choices, plan.n) if has_prompts else ()
        self._kept: dict[int, list[tuple[int, Event]]] = {first: [] for first in firsts}

    def opening(self) -> Sequence[ServerEvent]:
        openings = [choice.opening() for choice in self._choices]
        return [self._chunk(opening) for opening in openings if opening is not None]

    def add(self, index: int, event: Event) -> Sequence[ServerEvent]:
        if not self._plan.is_streamed:
            if (completion := self._builders[index].add(event)) is not None:
                self._completions[index] = completion
            return ()
        parts = [self._part(*each) for each in self._with_prompts(index, event)]
        return [self._chunk(part) for part in parts if part is not None]

    def ending(self) -> Sequence[ServerEvent]:
        if not self._plan.includes_usage:
            return (DONE,)
        return ServerEvent(self._around(self._chunk_object, [], usage=usage(self._tally.counts))), DONE

    def failing(self, error: ApiError) -> Sequence[ServerEvent]:
        return (ServerEvent(openai_error(error)),)

    def whole(self) -> Mapping[str, Any]:
        best_of, ended = self._plan.best_of, [self._completions[index] for index in range(len(self._builders))]
        ended = [
            replace(each, prompt_logprobs=ended[index - index % best_of].prompt_logprobs)
            for index, each in enumerate(ended)
        ]
        return self._around(
            self._whole_object,
            [choice.whole(each) for choice, each in zip(self._choices, best(ended, self._plan), strict=True)],
            usage=usage(self._tally.counts),
            **self._of_prompt(self._plan, ended[0]),
        )

    def _with_prompts(self, index: int, event: Event) -> Sequence[tuple[int, Event]]:
        """Returns the events that a stream has now, each with the index of its choice.

        The prompt's log-probabilities come with its first choice only, and are returned for all its choices. Events of
        the other choices are held back until these log-probabilities are complete.
        """
        n = self._plan.n
        first = index - index % n
        if isinstance(event, PromptLogprobs):
            return [(each, event) for each in range(first, first + n)]
        if index != first and first in self._kept:
            self._kept[first].append((index, event))
            return ()
        return [(index, event), *self._kept.pop(first, ())]

    def _part(self, index: int, event: Event) -> dict[str, Any] | None:
        match event:
            case PromptLogprobs():
                return self._choices[index].prompt(event)
            case Delta():
                return self._choices[index].part(event)
            case Finished():
                return self._choices[index].ending(event)
        return None

    def _chunk(self, choice: dict[str, Any]) -> ServerEvent:
        more: dict[str, object] = {"usage": None} if self._plan.includes_usage else {}
        if self._plan.has_usage_in_chunks:
            more = {"usage": usage(self._tally.counts)}
        return ServerEvent(self._around(self._chunk_object, [choice], **more))

    def _around(self, kind: str, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        told = [
            {"prompt_token_ids": ids} if (ids := self._prompt_ids.pop(each["index"], None)) else {} for each in choices
        ]
        if self._has_one_prompt:
            more |= told[0] if told else {}
        else:
            choices = [{**each, **ids} for each, ids in zip(choices, told, strict=True)]
        return {"id": self._id, "object": kind, **self._envelope, "choices": choices, **more}


def finish_reason(reason: FinishReason) -> str:
    """Returns OpenAI's name for a finish reason."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def stop_reason(ended: Finished | Completion) -> str | int | None:
    """Returns the stop string, or the id of the stop token, that ended a choice, as vLLM tells it."""
    return ended.matched_stop


def with_token_ids(choice: dict[str, Any], token_ids: Sequence[int], plan: Plan) -> dict[str, Any]:
    return {**choice, "token_ids": list(token_ids)} if plan.returns_token_ids else choice


def best(completions: Sequence[Completion], plan: Plan) -> list[Completion]:
    """Returns the completions of the plan's choices: of each prompt's `best_of` completions, the best `n`.

    The best have the largest mean log-probability of a token; of equals, the earlier is better.
    """
    chosen: list[Completion] = []
    for first in range(0, plan.num_generations, plan.best_of):
        group = completions[first : first + plan.best_of]
        chosen += group if plan.best_of == plan.n else sorted(group, key=_mean_logprob, reverse=True)[: plan.n]
    return [replace(each, logprobs=()) for each in chosen] if plan.hides_logprobs else chosen


def _mean_logprob(completion: Completion) -> float:
    mean = fmean([each.chosen.logprob for each in completion.logprobs] or [-math.inf])
    return -math.inf if math.isnan(mean) else mean


def usage(counts: TokenCounts) -> dict[str, Any]:
    """Returns the `usage` object."""
    return {
        "prompt_tokens": counts.num_prompt,
        "completion_tokens": counts.num_completion,
        "total_tokens": counts.num_prompt + counts.num_completion,
        "prompt_tokens_details": {"cached_tokens": counts.num_cached},
        "completion_tokens_details": {"reasoning_tokens": counts.num_reasoning, **counts.drafts},
    }
