"""Tests of tools over HTTP, in front of a real pair with a random model: whatever the model would write, calls that
must fit a schema do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton import AsyncClient, ChatMessage, Client, Tool, ToolChoice
from gateway.apis.chat import parse_chat
from gateway.plan import ChatPrompt
from gateway.tools import ToolUse, parse_tools
from tests.gateway.callers import Caller
from tests.support.services_here import pair_here

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
SAMPLED = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}]


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


@pytest.mark.parametrize("sampling", SAMPLED, ids=["greedy", "sampled"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_calls_that_must_come_have_arguments_that_fit(
    caller: Caller, choice: Any, sampling: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"messages": USER, "tools": [PICK, CLOCK], "tool_choice": choice, "max_tokens": 120, "n": 2}
    asked |= {"parallel_tool_calls": False, **sampling}
    answer = await caller.chat(**asked)
    chunks = await caller.chat_chunks(**asked)
    for each in answer.choices:
        ((name, arguments),) = calls = called(each.message)
        assert_fits(name, arguments)
        assert each.finish_reason == "tool_calls"
        assert name == "pick" or choice == "required"
        assert not each.message.content
        assert called_in(chunks, each.index) == calls


async def test_required_calls_may_be_several(caller: Caller) -> None:
    asked: dict[str, Any] = {"messages": USER, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 150}
    nums = []
    for seed in range(4):
        (choice,) = (await caller.chat(**asked, temperature=1.5, seed=seed)).choices
        calls = called(choice.message)
        for name, arguments in calls[: len(calls) - (choice.finish_reason == "length")]:
            assert_fits(name, arguments)
        nums.append(len(calls))
    assert max(nums) > 1


async def test_an_answer_that_has_a_format_fits_it_or_is_calls(caller: Caller) -> None:
    strict = {"type": "function", "function": {**PICK["function"], "strict": True}}
    shape = {"type": "json_schema", "json_schema": {"name": "shape", "schema": {"enum": [7, "ab"]}}}
    for seed in range(4):
        answer = await caller.chat(
            messages=USER, tools=[strict], response_format=shape, max_tokens=120, temperature=2.0, seed=seed
        )
        (choice,) = answer.choices
        if calls := called(choice.message):
            for name, arguments in calls[: len(calls) - (choice.finish_reason == "length")]:
                assert_fits(name, arguments)
        else:
            assert json.loads(choice.message.content) in (7, "ab")


async def test_tools_that_may_not_be_called_are_not_told(caller: Caller) -> None:
    plain = await caller.chat(messages=USER, temperature=0, max_tokens=8)
    told = await caller.chat(messages=USER, temperature=0, max_tokens=8, tools=[PICK], tool_choice="auto")
    untold = await caller.chat(messages=USER, temperature=0, max_tokens=8, tools=[PICK], tool_choice="none")
    assert untold.choices[0].message.content == plain.choices[0].message.content
    assert untold.usage.prompt_tokens == plain.usage.prompt_tokens < told.usage.prompt_tokens


async def test_an_answer_continues_the_last_message(caller: Caller, pair: Client) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is "}]
    options = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    answer = await caller.chat(messages=messages, temperature=0, max_tokens=8, extra_body=options)
    text = "<|start|>user\nthe other thing<|end|>\n<|start|>assistant\nIt is "
    assert answer.choices[0].token_ids == list(pair.complete(text, temperature=0.0, max_tokens=8).token_ids)


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice()),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ToolChoice()),
        ({"parallel_tool_calls": False}, ToolChoice(parallel=False)),
        ({"tool_choice": "required"}, ToolChoice(required=True)),
        ({"tool_choice": NAMED}, ToolChoice(required=True, names=("pick",), parallel=False)),
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
    assert isinstance(prompt, ChatPrompt)
    assert prompt.arguments == {
        "chat": (ChatMessage("user", "the other thing"),),
        "tools": tools,
        "tool_choice": choice,
    }
    assert prompt.num_bytes > len(json.dumps(SIZE))


def test_only_functions_that_may_be_called_are_looked_for_in_an_output() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    use = parse_tools([PICK, CLOCK], allowed, None)
    assert isinstance(use, ToolUse)
    assert use.functions == {"pick": SIZE}
    assert parse_tools([PICK], "none", None) is None
    assert parse_tools([], "auto", True) is None


async def test_calls_come_in_the_form_that_the_decode_service_is_set_to(tiny_model_dir: Callable[[str], Path]) -> None:
    choice = ToolChoice(required=True, parallel=False)
    async with (
        pair_here(tiny_model_dir("llama"), decode={"output_format": "llama3"}) as pair,
        AsyncClient(pair.decode.address) as client,
    ):
        answer = await client.complete(
            chat=[ChatMessage("user", "a")], tools=[Tool("clock")], tool_choice=choice, seed=1
        )
    assert re.fullmatch(r'\n{0,2}\{"name": "clock", "parameters": \{\s*\}\}', answer.text)
