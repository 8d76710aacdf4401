"""Tests of tools over HTTP, in front of a real pair with a random model: whatever the model would write, calls that
must fit a schema do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from baton import ChatMessage, Tool, ToolChoice
from gateway.apis.chat import parse_chat
from gateway.plan import ChatInput
from gateway.tools import ToolUse, parse_tools
from tests.gateway.callers import Caller

SIZE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ab", "cd"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 2},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
PICK: Any = {"type": "function", "function": {"name": "pick", "description": "Picks one.", "parameters": SIZE}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "pick"}}
USER: list[Any] = [{"role": "user", "content": "the other thing"}]
SILENT: Any = {"reasoning_effort": "none"}


def assert_fits(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "clock":
        assert found == {}
        return
    assert (name, sorted(found)) == ("pick", ["kind", "sizes"])
    assert found["kind"] in ("ab", "cd") and len(found["sizes"]) <= 2
    assert all(type(size) is int and 1 <= size <= 9 for size in found["sizes"])


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def called_in(chunks: Sequence[Any], index: int) -> list[tuple[str, str]]:
    """Returns the calls of choice `index`, put together from the chunks of a stream."""
    calls: list[tuple[str, str]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            for part in (choice.delta.tool_calls or []) if choice.index == index else []:
                if part.index == len(calls):
                    calls.append((part.function.name, ""))
                name, arguments = calls[part.index]
                calls[part.index] = (name, arguments + (part.function.arguments or ""))
    return calls


@pytest.mark.parametrize(
    ("choice", "sampling"), [("required", {"temperature": 1.0, "seed": 3}), (NAMED, {"temperature": 0})]
)
def test_calls_that_must_come_have_arguments_that_fit(caller: Caller, choice: Any, sampling: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"messages": USER, "tools": [PICK, CLOCK], "tool_choice": choice, "max_tokens": 120, "n": 2}
    asked |= {"parallel_tool_calls": False, **SILENT, **sampling}
    answer = caller.chat(**asked)
    chunks = caller.chat_chunks(**asked)
    for each in answer.choices:
        ((name, arguments),) = calls = called(each.message)
        assert_fits(name, arguments)
        assert each.finish_reason == "tool_calls"
        assert name == "pick" or choice == "required"
        assert not each.message.content
        assert called_in(chunks, each.index) == calls


def test_required_calls_may_be_several(caller: Caller) -> None:
    asked: dict[str, Any] = {"messages": USER, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 150, **SILENT}
    nums = []
    for seed in range(4):
        (choice,) = caller.chat(**asked, temperature=1.5, seed=seed).choices
        calls = called(choice.message)
        for name, arguments in calls[: len(calls) - (choice.finish_reason == "length")]:
            assert_fits(name, arguments)
        nums.append(len(calls))
    assert max(nums) > 1


def test_an_answer_that_has_a_format_fits_it_or_is_calls(caller: Caller) -> None:
    strict = {"type": "function", "function": {**PICK["function"], "strict": True}}
    shape = {"type": "json_schema", "json_schema": {"name": "shape", "schema": {"enum": [7, "ab"]}}}
    for seed in range(4):
        answer = caller.chat(
            messages=USER, tools=[strict], response_format=shape, max_tokens=120, temperature=2.0, seed=seed, **SILENT
        )
        (choice,) = answer.choices
        if calls := called(choice.message):
            for name, arguments in calls[: len(calls) - (choice.finish_reason == "length")]:
                assert_fits(name, arguments)
        else:
            assert json.loads(choice.message.content) in (7, "ab")


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice()),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ToolChoice()),
        ({"parallel_tool_calls": False}, ToolChoice(parallel=False)),
        ({"tool_choice": "required"}, ToolChoice(required=True)),
        ({"tool_choice": NAMED}, ToolChoice(required=True, names=("pick",), parallel=False)),
        (
            {
                "tools": [
                    {"function": {**PICK["function"], "cache_control": {}}, "cache_control": {}},
                    {**CLOCK, "type": None},
                ],
                "tool_choice": {"function": {"name": "pick"}},
            },
            ToolChoice(required=True, names=("pick",), parallel=False),
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            ToolChoice(names=("pick",)),
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            ToolChoice(required=True, names=("pick",)),
        ),
    ],
)
def test_a_choice_of_tools_is_what_openai_means_by_it(fields: dict[str, Any], choice: ToolChoice) -> None:
    body = {"model": "m", "messages": USER, "tools": [PICK, CLOCK], **fields}
    (prompt,) = parse_chat(json.dumps(body).encode()).prompts
    tools = (Tool("pick", "Picks one.", json.dumps(SIZE)), Tool("clock"))
    assert isinstance(prompt, ChatInput)
    assert prompt.arguments == {
        "chat": (ChatMessage("user", "the other thing"),),
        "tools": tools,
        "tool_choice": choice,
    }
    assert prompt.num_bytes > len(json.dumps(SIZE))
    (untold,) = parse_chat(json.dumps({**body, "tool_choice": "none"}).encode()).prompts
    assert untold.arguments == {"chat": (ChatMessage("user", "the other thing"),)}


def test_only_functions_that_may_be_called_are_looked_for_in_an_output() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    use = parse_tools([PICK, CLOCK], allowed, None)
    assert isinstance(use, ToolUse)
    assert use.functions == {"pick": SIZE}
    assert parse_tools([PICK], "none", None) is None
    assert parse_tools([], "auto", True) is None
