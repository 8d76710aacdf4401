"""The /v1/chat/completions endpoint: parses chat requests and writes chat answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from baton.events import Completion, Delta, Finished, FinishReason, PromptLogprobs, Started
from common.text.chat_messages import ChatMessage, ToolCall
from common.text.output_formats import OutputFormat
from gateway.apis.api import Api
from gateway.apis.choices_answer import ChoicesAnswer, finish_reason, stop_reason, with_token_ids
from gateway.conversation import (
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    PART_HINTS,
    TEXT_OR_PARTS,
    at_most,
    messages_schema,
    new_call_id,
    not_empty,
    part_text,
    refuse_other_fields,
    string,
    system_message,
    text_of,
)
from gateway.errors import invalid, none_of, not_served, shown
from gateway.fields import ChoicesFields, RequestFields, parse_fields
from gateway.logprobs import chat_logprobs, prompt_logprobs
from gateway.parsing.events import CallArguments, CallBegun, ContentText, OutputEvent, ReasoningText
from gateway.parsing.parser import OutputParser
from gateway.plan import ChatInput, Plan
from gateway.reasoning import Effort, ReasoningFields, effort_wish
from gateway.tools import CHOICE, TOOLS, parse_tools

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MESSAGE_FIELDS = {"role", "content", "name", "cache_control", "metadata"}
_FIELDS_OF_ROLES = {
    "assistant": {
        *("refusal", "tool_calls", "reasoning_content", "reasoning", "reasoning_details"),
        *("parsed", "provider_specific_fields", "reasoning_items", "thinking_blocks"),
    },
    "tool": {"tool_call_id"},
}
_THINKING_FIELDS = PART_HINTS | {"thinking", "signature", "closed"}
"""The fields of a part of an assistant's content that is a thought, as Anthropic and Mistral write it."""
_CALL_FIELDS = {"id", "type", "function", "index", "cache_control", "provider_specific_fields"}
_FUNCTION_FIELDS = {"name", "arguments", "parsed_arguments", "provider_specific_fields"}
"""Fields of messages, calls and functions. Those that are parsed or a provider's are additions of OpenAI's package and
of LiteLLM to an answer, which they send back with it. They are ignored.
"""
_MAX_NAME_CHARS = 64
_TEXT = {"text": "text"}
_SAID = {**_TEXT, "refusal": "refusal", "thinking": "thinking"}

Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)]


_TEXT_OR_NULL = {"type": ["string", "null"]}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}}},
    },
}
ChatMessages = Annotated[
    Messages,
    messages_schema(
        _ROLES,
        {"anyOf": [*TEXT_OR_PARTS, {"type": "null"}]},
        tool_calls={"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
        tool_call_id={"type": "string"},
        refusal=_TEXT_OR_NULL,
        reasoning_content=_TEXT_OR_NULL,
        reasoning=_TEXT_OR_NULL,
    ),
]


class TemplateFields(ReasoningFields, RequestFields):
    """The fields that the chat template sees, besides the messages."""

    tools: Annotated[list[Any], at_most(MAX_TOOLS), TOOLS] | None = None
    tool_choice: Annotated[Any, CHOICE] = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    reasoning_effort: Effort | None = None


class ChatFields(ChoicesFields, TemplateFields):
    messages: ChatMessages
    max_completion_tokens: int | None = None
    include_reasoning: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    asks_for_nothing: ClassVar = {"add_special_tokens": (False,), "echo": (False,), "separate_reasoning": (True,)}
    names_here: ClassVar = {"max_output_tokens": "max_completion_tokens", "stop_sequences": "stop"}


class ChatChoice:
    """Builds the JSON of one choice of a chat answer, as chunks of a stream or whole."""

    def __init__(self, index: int, plan: Plan, form: OutputFormat, started: Started) -> None:
        self._index = index
        self._plan = plan
        self._has_begun = self._has_content = False
        self._parser = OutputParser(
            form,
            functions=plan.functions,
            is_reasoning_open=started.is_reasoning_open,
            has_only_calls=plan.requires_calls,
        )

    def opening(self) -> dict[str, Any] | None:
        return None if self._plan.functions else self._chunk({})  # a call has no content, not an empty one

    def prompt(self, event: PromptLogprobs) -> dict[str, Any] | None:
        return None

    def part(self, delta: Delta) -> dict[str, Any] | None:
        spoken = self._delta(self._parser.push(delta.text))
        if not (spoken or delta.logprobs or self._plan.returns_token_ids):
            return None  # the text comes later than the token ids
        if not (spoken or self._plan.functions):
            spoken = {"content": ""}
        return self._chunk(spoken, logprobs=chat_logprobs(delta.logprobs), token_ids=delta.token_ids)

    def ending(self, finished: Finished) -> dict[str, Any]:
        rest = self._delta(self._parser.end())
        if not (self._has_content or self._parser.num_calls):
            rest = {"content": "", **rest}
        return self._chunk(rest, reason=self._finish_reason(finished.reason), stop_reason=stop_reason(finished))

    def whole(self, completion: Completion) -> dict[str, Any]:
        spoken = self._delta([*self._parser.push(completion.text), *self._parser.end()])
        calls = spoken.pop("tool_calls", [])
        message = {"role": "assistant", "content": None if calls else "", "refusal": None, **spoken}
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": chat_logprobs(completion.logprobs),
            "finish_reason": self._finish_reason(completion.finish_reason),
            "stop_reason": stop_reason(completion),
        }
        return with_token_ids(choice, completion.token_ids, self._plan)

    def _delta(self, events: Iterable[OutputEvent]) -> dict[str, Any]:
        """Returns the `delta` object of a chunk. A call's first piece has its id and its function's name."""
        texts: dict[str, str] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case ReasoningText() if not self._plan.includes_reasoning:
                    pass
                case ReasoningText():
                    for name in ("reasoning_content", "reasoning"):  # two names of one thing
                        texts[name] = texts.get(name, "") + event.as_line
                case ContentText():
                    texts["content"] = texts.get("content", "") + event.as_line
                case CallBegun(index, name):
                    call_id = new_call_id()
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        return {**texts, "tool_calls": list(calls.values())} if calls else dict(texts)

    def _finish_reason(self, reason: FinishReason) -> str:
        has_ended = reason is not FinishReason.LENGTH
        return "tool_calls" if has_ended and self._parser.num_calls else finish_reason(reason)

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: Any = None,
        reason: str | None = None,
        stop_reason: str | int | None = None,
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Returns a chunk. A choice's first chunk has the role.

        With functions its content is null, unless it has some: only the output's end shows that there was no call.
        """
        if not self._has_begun:
            self._has_begun = True
            delta = {"role": "assistant", "content": None if self._plan.functions else "", **delta}
        self._has_content = self._has_content or delta.get("content") is not None
        chunk = {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": stop_reason,
        }
        return with_token_ids(chunk, token_ids, self._plan)


def chat_prompt(messages: Sequence[dict[str, Any]], fields: TemplateFields) -> ChatInput:
    """Returns the prompt of a chat. Raises ApiError, which names the wrong field."""
    parsed = ((f"messages[{i}]", _message(f"messages[{i}]", each)) for i, each in enumerate(messages))
    kept = [(place, message) for place, message in parsed if message is not None]
    return ChatInput(
        messages=tuple(message for _, message in kept),
        places=tuple(place for place, _ in kept) if len(kept) < len(messages) else (),
        tools=parse_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls),
        options=_template_options(fields),
        variables=fields.chat_template_kwargs or {},
        wishes=fields.wishes(effort_wish("reasoning_effort", fields.reasoning_effort)),
    )


def chat_params(prompt: ChatInput) -> dict[str, str]:
    """Returns a mapping from the prompt's field names in the gRPC request to those in the HTTP request."""
    return {
        **prompt.params_of_wishes,
        **{f"chat.tools[{i}].parameters": f"tools[{i}].function.parameters" for i in range(prompt.num_tools)},
        **{f"chat.messages[{i}].": place for i, place in enumerate(prompt.places)},
        "prompt": "messages",
        "chat": "messages",
    }


def parse_chat(body: bytes) -> Plan:
    """Parses the body of a chat request. Raises ApiError, which names the wrong field."""
    fields = parse_fields(body, ChatFields)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if fields.best_of not in (None, fields.n):
        raise not_served("best_of", "only the value of n is")
    max_tokens, max_name = _max_tokens(fields)
    prompt = chat_prompt(fields.messages, fields)
    return Plan(
        model=fields.model,
        prompts=(prompt,),
        n=fields.n,
        best_of=fields.n,
        sampling=fields.sampling(
            max_tokens=max_tokens, logprobs=(fields.top_logprobs or 0) if fields.logprobs else None
        ),
        priority=fields.priority,
        cache_salt=fields.cache_salt,
        cache_prompt=fields.cache_prompt,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        is_streamed=fields.stream,
        includes_usage=fields.includes_usage,
        has_usage_in_chunks=fields.has_usage_in_chunks,
        returns_token_ids=fields.return_token_ids,
        includes_reasoning=fields.include_reasoning and not fields.hides_reasoning,
        num_prompt_logprobs=fields.prompt_logprobs,
        params={
            "sampling.max_tokens": max_name,
            "sampling.logprobs": "top_logprobs",
            **fields.grammar_params,
            **chat_params(prompt),
        },
    )


def _of_prompt(plan: Plan, completion: Completion) -> Mapping[str, Any]:
    if (num_top := plan.num_prompt_logprobs) is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(completion.prompt_logprobs, num_top=num_top)}


CHAT = Api(
    path="/v1/chat/completions",
    fields=ChatFields,
    parse=parse_chat,
    parses_output=True,
    begin=partial(
        ChoicesAnswer,
        id_prefix="chatcmpl",
        whole_object="chat.completion",
        chunk_object="chat.completion.chunk",
        new_choice=ChatChoice,
        of_prompt=_of_prompt,
        has_one_prompt=True,
    ),
)


def _template_options(fields: TemplateFields) -> dict[str, Any]:
    """Returns the request's options for the chat template, without those that have their default."""
    options: dict[str, Any] = {}
    if fields.continue_final_message:
        options["continue_final_message"] = True
    if fields.add_generation_prompt is not None and (fields.continue_final_message or not fields.add_generation_prompt):
        options["add_generation_prompt"] = fields.add_generation_prompt
    return options


def _max_tokens(fields: ChatFields) -> tuple[int | None, str]:
    """Returns the limit on output tokens, None if the request sets none, and the name of the field that sets it.

    Raises ApiError if two fields set different limits.
    """
    if fields.max_completion_tokens is None:
        return fields.max_tokens, "max_tokens"
    if fields.max_tokens not in (None, fields.max_completion_tokens):
        both = f"{shown(fields.max_tokens)} differs from {shown(fields.max_completion_tokens)}"
        raise invalid("max_tokens", f"{both} of max_completion_tokens, its other name")
    return fields.max_completion_tokens, "max_completion_tokens"


def _message(place: str, message: dict[str, Any]) -> ChatMessage | None:
    """Parses one message. Returns None for a system message that is left out.

    Raises ApiError, in which `place` names the message, such as "messages[0]".
    """
    role = message.get("role")
    if role is None:
        raise invalid(f"{place}.role", "is required", code="missing_required_parameter")
    if role == "function":
        raise not_served(f"{place}.role", "tool is")
    if not isinstance(role, str) or role not in _ROLES:
        raise none_of(f"{place}.role", role, _ROLES)
    refuse_other_fields(place, message, _MESSAGE_FIELDS | _FIELDS_OF_ROLES.get(role, set()))
    name = message.get("name")
    if role == "tool":
        return ChatMessage(
            role,
            text_of(f"{place}.content", message.get("content"), _TEXT),
            tool_call_id=not_empty(f"{place}.tool_call_id", message.get("tool_call_id")),
            name="" if name is None else string(f"{place}.name", name),
        )
    # Checked, but not passed on, because chat templates do not receive it.
    if name is not None and len(string(f"{place}.name", name)) > _MAX_NAME_CHARS:
        raise invalid(f"{place}.name", f"has {len(name)} characters, more than {_MAX_NAME_CHARS}")
    if role == "assistant":
        calls = _tool_calls(f"{place}.tool_calls", message.get("tool_calls"))
        said, thought = _said_by_assistant(place, message, has_calls=bool(calls))
        names = ("reasoning_content", "reasoning")  # two names of one thing
        reasoning = [string(f"{place}.{name}", message[name]) for name in names if message.get(name) is not None]
        return ChatMessage(role, said, calls, reasoning=next(filter(None, (*reasoning, thought)), ""))
    role, said = _ROLES[role], text_of(f"{place}.content", message.get("content"), _TEXT)
    return system_message(said) if role == "system" else ChatMessage(role, said)


def _said_by_assistant(place: str, message: dict[str, Any], *, has_calls: bool) -> tuple[str, str]:
    """Returns the text of an assistant's message, which is its content and its refusal as further lines, and the text
    of the content's parts that are thoughts.

    Content that is null counts as "". So does absent content, if the message has a refusal or tool calls.
    """
    refusal = message.get("refusal")
    if refusal is not None:
        string(f"{place}.refusal", refusal)
    said = message.get("content")
    if said is None and ("content" in message or refusal is not None or has_calls):
        said = ""
    place = f"{place}.content"
    if not isinstance(said, list):
        return "\n".join(filter(None, (text_of(place, said, _SAID), refusal))), ""
    texts: list[str] = []
    thoughts: list[str] = []
    for number, part in enumerate(said):
        where = f"{place}[{number}]"
        if isinstance(part, dict) and part.get("type") == "thinking":
            refuse_other_fields(where, part, _THINKING_FIELDS)
            thoughts.append(text_of(f"{where}.thinking", part.get("thinking"), _TEXT))
        else:
            texts.append(part_text(where, part, _SAID))
    text = "\n".join(texts)
    return "\n".join(filter(None, (text, refusal))), "\n".join(thoughts)


def _tool_calls(place: str, calls: Any) -> tuple[ToolCall, ...]:
    """Parses the tool calls of an assistant's message. None and an empty list both mean no calls."""
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise invalid(place, "must be a list of calls")
    if len(calls) > MAX_TOOL_CALLS:
        raise invalid(place, f"{len(calls)} calls are more than {MAX_TOOL_CALLS}")
    return tuple(_tool_call(f"{place}[{number}]", call) for number, call in enumerate(calls))


def _tool_call(place: str, call: Any) -> ToolCall:
    if not isinstance(call, dict):
        raise invalid(place, "must be a call of a function")
    if call.get("type") not in (None, "function"):
        raise not_served(f"{place}.type", '"function" is')
    refuse_other_fields(place, call, _CALL_FIELDS)
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{place}.function", "must be an object with name and arguments")
    refuse_other_fields(f"{place}.function", function, _FUNCTION_FIELDS)
    return ToolCall(
        id=not_empty(f"{place}.id", call.get("id")),
        name=not_empty(f"{place}.function.name", function.get("name")),
        arguments=string(f"{place}.function.arguments", function.get("arguments"), "of JSON"),
    )
