"""Checks messages and their parts, and maps the names of their fields, for all endpoints that answer conversations."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import BeforeValidator, WithJsonSchema

from common.rpc.server_bounds import MAX_REQUEST_FIELDS
from common.text.chat_messages import ChatMessage
from gateway.errors import ApiError, invalid, not_served, shown

MAX_MESSAGES = MAX_REQUEST_FIELDS // 2
"""The most messages in a request. Each has at least two fields in the gRPC request, whose
number of fields is limited.
"""
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""The most calls in a message, which is the decode service's limit."""
_CALL_ID_CHARS = 9  # the chat templates of Mistral's models take no other length
PART_HINTS = frozenset(
    {"type", "id", "index", "cache_control", "prompt_cache_breakpoint", "annotations", "logprobs", "parsed"}
)
"""Fields of a text part that change nothing, beside the type."""
_NEUTRAL = (
    ("allowed_callers", ["direct"]),
    ("async", False),
    ("caller", {"type": "direct"}),
    ("defer_loading", False),
)
"""Fields of tools, calls and their answers that are not served, with the values that ask for nothing."""
_BILLING = re.compile(r"\s*x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*(?:;|(?=\s|$)))+[ \t]*\n?")
"""Matches Claude Code's text for Anthropic's billing at the start of a system prompt's part."""


TEXT_OR_PARTS = [{"type": "string"}, {"type": "array", "items": {"type": "object", "required": ["type"]}}]
"""The JSON schemas of a message's content, in the OpenAPI document."""


def messages_schema(roles: Iterable[str], content: Any, **fields: Any) -> WithJsonSchema:
    """Returns the JSON schema of a list of messages, for the OpenAPI document. `content` is the schema of a message's
    content, and `fields` are those of its other fields.
    """
    properties = {"role": {"enum": sorted(roles)}, "content": content, **fields}
    message = {"type": "object", "required": ["role"], "properties": properties}
    return WithJsonSchema({"type": "array", "items": message, "minItems": 1})


def at_most(num: int) -> BeforeValidator:
    """Returns a validator that raises ValueError for a longer list or object, before pydantic validates any entry."""

    def check(entries: Any) -> Any:
        if isinstance(entries, list | dict) and len(entries) > num:
            raise ValueError(f"{len(entries)} are more than {num}")
        return entries

    return BeforeValidator(check)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A chat message, and the places in the request of the message and of its calls."""

    message: ChatMessage
    place: str
    calls: tuple[str, ...] = ()


def joined(turns: Iterable[ChatTurn]) -> Iterator[ChatTurn]:
    """Yields the turns; adjacent turns of one role become one, with their texts as lines. Answers of tools stay apart.

    Agents send several messages in a row, and some chat templates want roles to take turns.
    """
    for role, neighbours in groupby(turns, key=lambda turn: turn.message.role):
        group = list(neighbours)
        if len(group) == 1 or role == "tool":
            yield from group
            continue
        messages = [turn.message for turn in group]
        message = ChatMessage(
            role,
            "\n".join(message.content for message in messages if message.content),
            tuple(call for message in messages for call in message.tool_calls),
            reasoning="\n".join(message.reasoning for message in messages if message.reasoning),
        )
        yield ChatTurn(message, group[0].place, tuple(call for turn in group for call in turn.calls))


def params_of(turns: Sequence[ChatTurn], *, result_id: str, call_id: str) -> dict[str, str]:
    """Returns the places of the messages and calls in the request, by their names in the gRPC request.

    `result_id` is the field in which a result names its call, and `call_id` the field in which a call has its id.
    """
    params: dict[str, str] = {}
    for index, turn in enumerate(turns):
        name = f"chat.messages[{index}]"
        params |= {name: turn.place, f"{name}.tool_call_id": f"{turn.place}.{result_id}"}
        for number, place in enumerate(turn.calls):
            call = f"{name}.tool_calls[{number}]"
            params |= {call: place, f"{call}.id": f"{place}.{call_id}", f"{call}.name": f"{place}.name"}
    return params


def new_call_id() -> str:
    return uuid.uuid4().hex[:_CALL_ID_CHARS]


def refuse_other_fields(place: str, value: Mapping[str, Any], fields: Set[str]) -> None:
    """Raises ApiError for a field that is not among `fields`, unless its value asks for nothing."""
    for name, asked in value.items():
        if name not in fields and asked is not None and asked != [] and (name, asked) not in _NEUTRAL:
            raise not_served(f"{place}.{name}"[:128])


def not_empty(place: str, value: Any) -> str:
    if value is None:
        raise invalid(place, "is required", code="missing_required_parameter")
    text = string(place, value)
    if not text:
        raise invalid(place, "must not be empty")
    return text


def string(place: str, value: Any, of: str = "") -> str:
    if not isinstance(value, str):
        raise invalid(place, f"must be a string {of}".rstrip())
    return value


def text_of(place: str, value: Any, kinds: Mapping[str, str], *, between: str = "\n") -> str:
    """Returns a message's content as one string, with `between` between the parts of a list.

    `kinds` maps the types that parts may have to the names of the fields with their texts. Raises ApiError, which names
    `place`, for anything else.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(place, "must be a string or a list of text parts")
    return between.join(part_text(f"{place}[{number}]", part, kinds) for number, part in enumerate(value))


def without_billing(text: str) -> str:
    """Returns a system prompt, or a part of one, without Claude Code's text for Anthropic's billing. It differs in each
    request, so nothing of the prompt would be found in the cache. Proxies also send it to the other endpoints.
    """
    found = _BILLING.match(text)
    return text if found is None else text[found.end() :]


def system_message(text: str) -> ChatMessage | None:
    """Returns a system prompt's message, or None if the prompt has nothing but Claude Code's text for billing.

    An empty prompt stays: with some chat templates it replaces a default one.
    """
    rest = without_billing(text)
    return ChatMessage("system", rest) if rest or not text else None


def part_text(place: str, part: Any, kinds: Mapping[str, str]) -> str:
    """Returns the text of one content part, such as {"type": "text", "text": "..."}. Raises ApiError like `text_of`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(place, "must be a text part")
    if (field := kinds.get(kind)) is None:
        raise kind_not_served(place, kind, f"{' and '.join(kinds)} {'are' if len(kinds) > 1 else 'is'}")
    refuse_other_fields(place, part, PART_HINTS | {field})
    return string(f"{place}.{field}", part.get(field))


def kind_not_served(place: str, kind: Any, but: str) -> ApiError:
    """Returns the error for a `type` that is not supported. `but` names what is supported."""
    if kind is None:
        return invalid(place, f"is missing: {but}")
    is_word = isinstance(kind, str) and re.fullmatch("[a-z_0-9]{1,32}", kind)
    named = kind if is_word else shown(kind) or "this type"
    return invalid(place, f"{named} is not served, {but}", code="unsupported_parameter")
