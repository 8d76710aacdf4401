"""The messages of a conversation. The client's request brings them, and the model's chat template renders them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
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
    """One message of a conversation. Only an assistant's has `tool_calls`.

    A tool's message answers the ToolCall whose `id` is `tool_call_id`; `name` is the name of its function.
    """

    role: str
    content: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def texts(self) -> Iterator[str]:
        """All texts in the message, to check their size."""
        yield from (self.content, self.tool_call_id, self.name)
        for call in self.tool_calls:
            yield from (call.name, call.arguments, call.id)


def messages_to_json(messages: Sequence[ChatMessage]) -> str:
    return json.dumps(messages, default=lambda value: [getattr(value, name) for name in value.__slots__])


def messages_from_json(entries: Iterable[Any]) -> list[ChatMessage]:
    """Builds messages from `entries`, the parsed JSON of `messages_to_json`."""
    return [
        ChatMessage(role, content, tuple(ToolCall(*call) for call in tool_calls), *rest)
        for role, content, tool_calls, *rest in entries
    ]
