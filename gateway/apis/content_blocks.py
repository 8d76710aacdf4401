"""Content blocks of the Messages API: turns a conversation's blocks into chat messages, and output into blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from common.text.chat_messages import ChatMessage, ToolCall
from gateway.conversation import (
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    ChatTurn,
    joined,
    kind_not_served,
    new_call_id,
    not_empty,
    params_of,
    refuse_other_fields,
    string,
    text_of,
    without_billing,
)
from gateway.errors import invalid, none_of
from gateway.parsing.events import CallArguments, CallBegun, ContentText, OutputEvent, ReasoningText

SIGNATURE = "unsigned"
"""The `signature` of every thinking block: some clients send back only blocks that have one. Signatures are not
checked.
"""

_TEXT = {"text": "text"}
_FIELDS: Mapping[str, frozenset[str]] = {
    kind: frozenset({"type", "id", "index", "cache_control", *fields})
    for kind, fields in {
        "text": ("text",),
        "thinking": ("thinking", "signature"),
        "redacted_thinking": ("data",),
        "tool_use": ("name", "input"),
        "tool_result": ("tool_use_id", "content", "is_error"),
    }.items()
}
_KINDS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
ROLES = tuple(_KINDS)

_Block = tuple[str, Mapping[str, Any]]
"""A block's place in the request, and the block."""


def chat_of(system: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[ChatMessage, ...], dict[str, str]]:
    """Returns the chat of a request's `system` and `messages`. Adjacent messages of one role become one.

    Also returns a mapping from field names in the gRPC request to those in `messages`. Raises ApiError, which names the
    wrong field.
    """
    words = "" if system is None else text_of("system", system, _TEXT, between="")
    parts = [block["text"] for block in system] if isinstance(system, list) else [words]
    words = "".join(map(without_billing, parts))
    turns = [ChatTurn(ChatMessage("system", words), "system")] if words else []
    num_results = 0
    for index, message in enumerate(messages):
        for turn in _turns(f"messages[{index}]", message):
            turns.append(turn)
            num_results += turn.message.role == "tool"
            if num_results > MAX_MESSAGES:
                raise invalid("messages", f"more than {MAX_MESSAGES} tool results")
    turns = list(joined(turns))
    if len(turns) > MAX_MESSAGES:
        raise invalid("messages", f"{len(turns)} messages and tool results are more than {MAX_MESSAGES}")
    params = params_of(turns, result_id="tool_use_id", call_id="id")
    return tuple(turn.message for turn in turns), params


def _turns(place: str, message: Mapping[str, Any]) -> Iterator[ChatTurn]:
    """Yields the chat messages that one message of the request becomes."""
    role = message.get("role")
    if role is None:
        raise invalid(f"{place}.role", "is required")
    if not isinstance(role, str) or role not in _KINDS:
        raise none_of(f"{place}.role", role, _KINDS)
    refuse_other_fields(place, message, {"role", "content", "cache_control"})
    blocks = _blocks(f"{place}.content", message.get("content"), _KINDS[role])
    match role:
        case "user":
            yield from _said_by_user(place, blocks)
        case "assistant":
            yield _said_by_assistant(place, blocks)
        case _:
            if words := "".join(without_billing(_text(block)) for block in blocks):
                yield ChatTurn(ChatMessage(role, words), place)


def _said_by_user(place: str, blocks: Iterable[_Block]) -> Iterator[ChatTurn]:
    """Yields a tool's message for each result, and then a user's message with the text."""
    words: list[str] = []
    num_results = 0
    for where, block in blocks:
        if block["type"] == "text":
            words.append(_text((where, block)))
        elif words:
            raise invalid(where, "a tool_result comes before all text")
        else:
            num_results += 1
            yield ChatTurn(_result(where, block), where)
    if words:
        yield ChatTurn(ChatMessage("user", "\n".join(words)), place)
    elif num_results == 0:
        raise invalid(f"{place}.content", "must not be empty")


def _said_by_assistant(place: str, blocks: Iterable[_Block]) -> ChatTurn:
    """Returns an assistant's message. Its texts become lines, as in a chat's answer."""
    words: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    places: list[str] = []
    for where, block in blocks:
        match block["type"]:
            case "text":
                words.append(_text((where, block)))
            case "thinking":
                reasoning.append(_text((where, block)))
            case "tool_use" if len(calls) == MAX_TOOL_CALLS:
                raise invalid(f"{place}.content", f"more than {MAX_TOOL_CALLS} calls")
            case "tool_use":
                calls.append(_call(where, block))
                places.append(where)
    message = ChatMessage("assistant", "\n".join(words), tuple(calls), reasoning="\n".join(reasoning))
    return ChatTurn(message, place, tuple(places))


def _call(where: str, block: Mapping[str, Any]) -> ToolCall:
    if not isinstance(block.get("input"), dict):
        raise invalid(f"{where}.input", "must be an object")
    return ToolCall(
        id=not_empty(f"{where}.id", block.get("id")),
        name=not_empty(f"{where}.name", block.get("name")),
        arguments=json.dumps(block["input"], ensure_ascii=False),
    )


def _result(where: str, block: Mapping[str, Any]) -> ChatMessage:
    content, is_error = block.get("content"), block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise invalid(f"{where}.is_error", "must be true or false")
    words = "" if content is None else text_of(f"{where}.content", content, _TEXT)
    if is_error:  # chat templates have no field for it
        words = f"Error: {words}" if words else "Error"
    return ChatMessage("tool", words, tool_call_id=not_empty(f"{where}.tool_use_id", block.get("tool_use_id")))


def _text(placed: _Block) -> str:
    place, block = placed
    return string(f"{place}.{block['type']}", block.get(block["type"]))


def _blocks(place: str, content: Any, kinds: Sequence[str]) -> Iterator[_Block]:
    """Yields the blocks of a content, each of which must be of one of `kinds`. A string is one text block."""
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise invalid(place, "must be a string or a list of content blocks")
    for number, block in enumerate(content):
        where = f"{place}[{number}]"
        if not isinstance(block, dict):
            raise invalid(where, "must be a content block")
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise kind_not_served(f"{where}.type", kind, f"{' and '.join(kinds)} {'are' if len(kinds) > 1 else 'is'}")
        refuse_other_fields(where, block, _FIELDS[kind])
        yield where, block


class BlockWriter:
    """Turns the parts of an output into the stream events of content blocks.

    The arguments of a call must come whole, in one part. The blocks are the same however the other parts are cut.
    """

    def __init__(self, *, includes_thinking: bool) -> None:
        self._includes_thinking = includes_thinking
        self._kinds: list[str] = []
        self._is_open = False

    def add(self, parts: Iterable[OutputEvent]) -> list[dict[str, Any]]:
        """Takes more parts of the output. Returns the stream's events for them."""
        events: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case ReasoningText() if not self._includes_thinking:
                    pass
                case ReasoningText():
                    events += self._add_text("thinking", part, signature="")
                case ContentText():
                    events += self._add_text("text", part)
                case CallBegun(_, name):
                    events += self._open({"type": "tool_use", "id": new_call_id(), "name": name, "input": {}})
                case CallArguments(_, text):
                    events.append(self._delta("input_json_delta", partial_json=text))
        return events

    def end(self) -> list[dict[str, Any]]:
        """Returns the events that end the last block."""
        if not self._is_open:
            return []
        self._is_open = False
        signed = [self._delta("signature_delta", signature=SIGNATURE)] if self._kinds[-1] == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": len(self._kinds) - 1}]

    def _add_text(self, kind: str, piece: ReasoningText | ContentText, **more: str) -> list[dict[str, Any]]:
        if self._is_open and self._kinds[-1] == kind:
            return [self._delta(f"{kind}_delta", **{kind: piece.as_line})]
        return [*self._open({"type": kind, kind: "", **more}), self._delta(f"{kind}_delta", **{kind: piece.text})]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        ended = self.end()
        self._kinds.append(block["type"])
        self._is_open = True
        return [*ended, {"type": "content_block_start", "index": len(self._kinds) - 1, "content_block": block}]

    def _delta(self, kind: str, **part: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._kinds) - 1, "delta": {"type": kind, **part}}


def content_of(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the content blocks that a stream's events add up to."""
    content: list[dict[str, Any]] = []
    for event in events:
        if "content_block" in event:
            content.append(dict(event["content_block"]))
        for name, text in event.get("delta", {}).items():
            if name == "partial_json":
                content[-1]["input"] = json.loads(text)
            elif name != "type":
                content[-1][name] += text
    return content
