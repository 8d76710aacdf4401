"""The /v1/completions endpoint: parses prompts and writes their continuations."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue

from baton.events import Completion, Delta, Finished, PromptLogprobs, PromptToken, Started
from common.text.output_formats import OutputFormat
from gateway.apis.api import Api
from gateway.apis.choices_answer import ChoicesAnswer, finish_reason, stop_reason, with_token_ids
from gateway.errors import invalid
from gateway.fields import ChoicesFields, parse_fields
from gateway.logprobs import CompletionLogprobs, prompt_logprobs
from gateway.plan import Plan, Prompt, TextInput, TokenIdsInput
from gateway.reasoning import Effort, ReasoningFields, effort_wish

_PROMPT_KINDS = "must be a string, or a list of strings, of token ids, or of lists of token ids"
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA: JsonSchemaValue = {
    "description": _PROMPT_KINDS,
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS,
        {"type": "array", "items": _IDS},
    ],
}
DEFAULT_MAX_TOKENS = 16
"""The value that OpenAI documents."""


def _unless_false(value: Any) -> Any:
    """Turns `false` into None: both ask for no log-probabilities. Chat requests use `false`, so it is accepted here."""
    return None if value is False else value


NumLogprobs = Annotated[int, Field(ge=0, le=20)]


class CompletionFields(ChoicesFields, ReasoningFields):
    """The fields of a completion. What they say of reasoning means nothing, because the prompt is no chat."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    echo: bool = False
    logprobs: Annotated[
        NumLogprobs | None, BeforeValidator(_unless_false, json_schema_input_type=NumLogprobs | Literal[False] | None)
    ] = None
    reasoning_effort: Effort | None = None

    asks_for_nothing: ClassVar = {"add_special_tokens": (True,), "separate_reasoning": (False, True)}
    names_here: ClassVar = {
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "stop_sequences": "stop",
    }


class TextChoice:
    """Writes one choice of a completion as JSON, in chunks or whole."""

    def __init__(self, index: int, plan: Plan, _form: OutputFormat, _started: Started) -> None:
        self._index = index
        self._plan = plan
        prompt = plan.prompt_of(index)
        is_cut = plan.truncate_prompt_tokens is not None
        self._echoed = prompt.text if plan.echoes_prompt and isinstance(prompt, TextInput) and not is_cut else None
        self._logprobs = CompletionLogprobs(self._echoed)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def opening(self) -> dict[str, Any] | None:
        return None if self._echoed is None else self._choice(self._echoed)

    def prompt(self, event: PromptLogprobs) -> dict[str, Any] | None:
        if not self._plan.echoes_prompt:
            return None
        return self._choice(self._text_of(event.tokens), logprobs=self._columns_of(event.tokens))

    def part(self, delta: Delta) -> dict[str, Any] | None:
        if not (delta.text or delta.logprobs or self._plan.returns_token_ids):
            return None  # the text may come later than the token ids
        return self._choice(delta.text, logprobs=self._logprobs.of(delta.logprobs), token_ids=delta.token_ids)

    def ending(self, finished: Finished) -> dict[str, Any]:
        return self._choice("", reason=finish_reason(finished.reason), stop_reason=stop_reason(finished))

    def whole(self, completion: Completion) -> dict[str, Any]:
        tokens = completion.prompt_logprobs if self._plan.echoes_prompt else ()
        columns = self._columns_of(tokens)
        choice = self._choice(
            (self._echoed or "") + self._text_of(tokens) + completion.text,
            logprobs=_joined(columns, self._logprobs.of(completion.logprobs)),
            reason=finish_reason(completion.finish_reason),
            stop_reason=stop_reason(completion),
            token_ids=completion.token_ids,
        )
        if (num_top := self._plan.num_prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(completion.prompt_logprobs, num_top=num_top)
        return choice

    def _text_of(self, tokens: Sequence[PromptToken]) -> str:
        """Returns the text of the echoed prompt's next tokens; "" if that text is known already.

        A character that the prompt begins and the output completes belongs to the output.
        """
        return "" if self._echoed is not None else self._decoder.decode(b"".join(each.token for each in tokens))

    def _columns_of(self, tokens: Sequence[PromptToken]) -> dict[str, Any] | None:
        num_top = self._plan.num_echoed_logprobs
        return None if num_top is None or not tokens else self._logprobs.of_prompt(tokens, num_top=num_top)

    def _choice(
        self,
        text: str,
        *,
        logprobs: Any = None,
        reason: str | None = None,
        stop_reason: str | int | None = None,
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }
        return with_token_ids(choice, token_ids, self._plan)


def parse_completion(body: bytes) -> Plan:
    """Parses the body of a completion request. Raises ApiError, which names the wrong field."""
    fields = parse_fields(body, CompletionFields)
    wishes = fields.wishes_of_text(effort_wish("reasoning_effort", fields.reasoning_effort))
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    best_of = fields.n if fields.best_of is None else fields.best_of
    if best_of < fields.n:
        raise invalid("best_of", f"{best_of} is less than n, {fields.n}")
    if best_of > fields.n and fields.stream:
        raise invalid("best_of", "above n does not go with stream: the best are known at the end")
    ranks = best_of > fields.n and fields.logprobs is None
    prompts = _prompts(fields.prompt)
    echoed = fields.logprobs if fields.echo else None
    is_cut = fields.truncate_prompt_tokens is not None
    needs_tokens = fields.echo and (is_cut or not isinstance(prompts[0], TextInput))  # decode knows their text
    return Plan(
        model=fields.model,
        prompts=prompts,
        wishes=wishes,
        n=fields.n,
        best_of=best_of,
        sampling=fields.sampling(
            max_tokens=max_tokens,
            logprobs=0 if ranks else fields.logprobs,
            echoed=0 if echoed is None and needs_tokens else echoed,
        ),
        hides_logprobs=ranks,
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        cache_prompt=fields.cache_prompt,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        is_streamed=fields.stream,
        includes_usage=fields.includes_usage,
        has_usage_in_chunks=fields.has_usage_in_chunks,
        returns_token_ids=fields.return_token_ids,
        echoes_prompt=fields.echo,
        num_echoed_logprobs=echoed,
        num_prompt_logprobs=fields.prompt_logprobs,
        params={"token_ids": "prompt", **fields.grammar_params},
    )


COMPLETIONS = Api(
    path="/v1/completions",
    fields=CompletionFields,
    parse=parse_completion,
    parses_output=False,
    begin=partial(
        ChoicesAnswer,
        id_prefix="cmpl",
        whole_object="text_completion",
        chunk_object="text_completion",
        new_choice=TextChoice,
    ),
)


def _joined(prompt: dict[str, Any] | None, output: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the `logprobs` object of an echoed prompt and its output."""
    if prompt is None or output is None:
        return prompt or output
    return {name: [*column, *output[name]] for name, column in prompt.items()}


def _prompts(prompt: Any) -> tuple[Prompt, ...]:
    """Returns the prompts in the `prompt` field: a string, a list of strings, a list of token ids, or a list of such
    lists.
    """
    if isinstance(prompt, str):
        return (TextInput(prompt),)
    if not isinstance(prompt, list):
        raise invalid("prompt", _PROMPT_KINDS)
    if not prompt:
        raise invalid("prompt", "is empty")
    if all(isinstance(each, str) for each in prompt):
        _refuse_empty(prompt)
        return tuple(map(TextInput, prompt))
    if _are_ids(prompt):
        return (_ids_prompt("prompt", prompt),)
    if all(isinstance(each, list) and _are_ids(each) for each in prompt):
        _refuse_empty(prompt)
        return tuple(_ids_prompt(f"prompt[{index}]", each) for index, each in enumerate(prompt))
    raise invalid("prompt", _PROMPT_KINDS)


def _refuse_empty(prompts: Sequence[str | list[int]]) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise invalid("prompt", f"is empty at index {index}")


def _ids_prompt(param: str, token_ids: list[int]) -> TokenIdsInput:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < 1 << 32:
            raise invalid(param, f"{token_id} at index {index} is no token id")
    return TokenIdsInput(tuple(token_ids))


def _are_ids(values: list[Any]) -> bool:
    return all(type(each) is int for each in values)
