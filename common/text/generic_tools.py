"""Writes tools, tool calls and their answers as ordinary messages, for models whose chat template has no form for them.

system      the tools, and how to call them; the first user if the template has no system messages
assistant   its words, then <tool_call> blocks
user        <tool_response> blocks, one for each answer, and the user's words that follow
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import replace

from common.text.chat_messages import ChatMessage, Tool, ToolCall
from common.text.output_formats import CALL

CALL_BEGIN, CALL_END = f"{CALL.opens}\n", f"\n{CALL.closes}"
ANSWER_BEGIN, ANSWER_END = "<tool_response>\n", "\n</tool_response>"
_TOLD = """You can call functions. Each line between the tags is one of them, in JSON: its name, what it does, and a
JSON schema of its arguments.
<tools>
{tools}
</tools>
To call a function, write only this, with the function's name and its arguments:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
For several calls, write it several times. You get the answers between <tool_response> and </tool_response>.
If you need no function, answer in words."""


def in_ordinary_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], *, has_answers: bool = False, has_system: bool = True
) -> tuple[list[ChatMessage], list[str]]:
    """Returns the conversation with tools, calls and answers written as ordinary messages, and for each message the
    place that it comes from, such as "messages[0]".

    Answers that follow each other become one message with the user's words after them, because some templates want
    users and assistants to take turns. `has_answers` says that the template has a form for answers, which then stay as
    they are. `has_system` says that it has a form for system messages.
    """
    told = _TOLD.format(tools="\n".join(json.dumps(each.as_read(), ensure_ascii=False) for each in tools))
    written: list[ChatMessage] = []
    places: list[str] = []
    teller = "system" if has_system else "user"
    may_tell = messages[:1] if has_system else messages
    told_at = next((index for index, each in enumerate(may_tell) if tools and each.role == teller), None)
    if tools and told_at is None:
        written.append(ChatMessage(teller, told))
        places.append("tools")
    before = ""
    for index, message in enumerate(messages):
        role, content = message.role, message.content
        if role == "tool" and has_answers:
            written.append(message)
            places.append(f"messages[{index}]")
            continue
        if role == "tool":
            role, content = "user", f"{ANSWER_BEGIN}{content}{ANSWER_END}"
        elif index == told_at:
            parts = (content, told) if has_system else (told, content)
            content = "\n\n".join(part for part in parts if part.strip())
        elif message.tool_calls:
            content = "\n".join([*([content] if content.strip() else []), *map(_call, message.tool_calls)])
        if role == "user" and before == "tool":
            written[-1] = ChatMessage("user", f"{written[-1].content}\n{content}")
        else:
            written.append(ChatMessage(role, content, reasoning=message.reasoning))
            places.append(f"messages[{index}]")
        before = message.role
    return written, places


def with_system_first(messages: Sequence[ChatMessage], places: Sequence[str]) -> tuple[list[ChatMessage], list[str]]:
    """Returns the conversation with one system message, at its beginning, whose lines are the words of all, and for
    each message the entry of `places` that it comes from. There must be a system message.
    """
    systems = [(message, place) for message, place in zip(messages, places, strict=True) if message.role == "system"]
    others = [(message, place) for message, place in zip(messages, places, strict=True) if message.role != "system"]
    words = "\n".join(message.content for message, _ in systems if message.content)
    written = [(ChatMessage("system", words), systems[0][1]), *others]
    return [message for message, _ in written], [place for _, place in written]


def with_neighbours_joined(
    messages: Sequence[ChatMessage], places: Sequence[str], roles: Set[str]
) -> tuple[list[ChatMessage], list[str]]:
    """Returns the conversation with one message instead of neighbours of one of `roles`, whose lines are the words of
    all, and for each message the entry of `places` that it comes from. A message with calls ends a message.
    """
    written: list[ChatMessage] = []
    kept: list[str] = []
    for message, place in zip(messages, places, strict=True):
        last = written[-1] if written else None
        if last is None or message.role not in roles or message.role != last.role or last.tool_calls:
            written.append(message)
            kept.append(place)
            continue
        content = "\n".join(each for each in (last.content, message.content) if each)
        reasoning = "\n".join(each for each in (last.reasoning, message.reasoning) if each)
        written[-1] = replace(message, content=content, reasoning=reasoning)
    return written, kept


def with_one_call_each(messages: Sequence[ChatMessage], places: Sequence[str]) -> tuple[list[ChatMessage], list[str]]:
    """Returns the conversation with at most one call in a message, directly before its answer, and for each message the
    entry of `places` that it comes from. Answers must come in the order of the calls. Words and reasoning stay beside
    the first call.
    """
    written: list[tuple[ChatMessage, str]] = []
    waiting = deque(zip(messages, places, strict=True))
    while waiting:
        message, place = waiting.popleft()
        if len(message.tool_calls) < 2:
            written.append((message, place))
            continue
        for number, call in enumerate(message.tool_calls):
            written.append((replace(message if not number else ChatMessage("assistant"), tool_calls=(call,)), place))
            if waiting and waiting[0][0].role == "tool":
                written.append(waiting.popleft())
    return [message for message, _ in written], [place for _, place in written]


def _call(call: ToolCall) -> str:
    arguments = call.arguments if call.arguments.strip() else "{}"
    return f'{CALL_BEGIN}{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}{CALL_END}'
