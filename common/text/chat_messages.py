"""A conversation and how it is rendered. The client's request brings it, and the model's chat template renders it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An assistant's call of a function. `arguments` is JSON text, exactly as a model wrote it."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. Only an assistant's message has `tool_calls`, and `reasoning` that came before it.

    A tool's message answers the ToolCall whose `id` is `tool_call_id`; `name` is the name of its function.
    """

    role: str
    content: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def texts(self) -> Iterator[str]:
        """All texts in the message, to check their size."""
        yield from (self.content, self.tool_call_id, self.name, self.reasoning)
        for call in self.tool_calls:
            yield from (call.name, call.arguments, call.id)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    `parameters` is JSON text: the JSON schema of the arguments, which are an object. "" means that there are none. If
    the tool is `strict`, the arguments of each call fit the schema.
    """

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.name, self.description, self.parameters)

    def as_read(self) -> dict[str, Any]:
        """Returns the tool in OpenAI's form, which chat templates expect."""
        said = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **said, "parameters": self.schema}}

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        schema: dict[str, Any] = json.loads(self.parameters)
        return schema


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that an output may call: those with these `names`, or all if there are none.

    If a call is `required`, the output consists of calls only, and their arguments fit the tools' schemas. Unless calls
    may be `parallel`, there is one call at most.
    """

    required: bool = False
    names: tuple[str, ...] = ()
    parallel: bool = True


def no_tool(name: str, names: Sequence[str]) -> str:
    """Returns the error message for a name in a choice that no tool of the request has; `names` are those they have."""
    return f"{name[:64]!r} is no tool's name, {listed(names)} {'is' if len(names) == 1 else 'are'}"


def listed(names: Sequence[str]) -> str:
    """Returns the first names for an error message."""
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """The values that a chat template gets besides the messages.

    `chat_template_kwargs` is JSON text: an object with more variables of the template, or "". With
    `continue_final_message` the output continues the last message. With `add_generation_prompt` the prompt ends with
    the beginning of an answer.
    """

    tools: tuple[Tool, ...] = ()
    chat_template_kwargs: str = ""
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    @property
    def texts(self) -> Iterator[str]:
        yield self.chat_template_kwargs
        for tool in self.tools:
            yield from tool.texts


NO_OPTIONS = TemplateOptions()


def chat_to_json(messages: Sequence[ChatMessage], options: TemplateOptions = NO_OPTIONS) -> str:
    return json.dumps([messages, options], default=lambda value: [getattr(value, name) for name in value.__slots__])


def chat_from_json(entries: Iterable[Any]) -> tuple[list[ChatMessage], TemplateOptions]:
    """Builds messages and options from `entries`, the parsed JSON of `chat_to_json`."""
    messages, (tools, *options) = entries
    return [
        ChatMessage(role, content, tuple(ToolCall(*call) for call in tool_calls), *rest)
        for role, content, tool_calls, *rest in messages
    ], TemplateOptions(tuple(Tool(*tool) for tool in tools), *options)


_MAX_DEPTH = 100


NO_OBJECT = "is no JSON object, nests too deeply, or has a number that JSON lacks"
"""The words of an error about a text for which `json_object` returns None."""


def finite(number: str) -> float:
    """Returns the number that is written in JSON. Raises ValueError if it is NaN or infinite."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


def json_object(text: str) -> Mapping[str, Any] | None:
    """Returns the JSON object in `text`. None if it is no object, has a number that is not finite, which JSON lacks,
    or nests so deeply that writing it may fail.
    """
    try:
        value = json.loads(text, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError):
        return None
    level, depth = [value], 0
    while level and depth <= _MAX_DEPTH:
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level, depth = [each for entries in inner for each in entries], depth + 1
    return value if isinstance(value, dict) and not level else None
