"""Tests of reasoning over HTTP, in front of a real pair with a random model: its length is bounded, and an answer that
must fit a grammar follows it.
"""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.callers import Caller
from tests.gateway.gateway_here import GatewayHere

BUDGET = 12
OPENED: list[Any] = [{"role": "user", "content": "the other thing"}, {"role": "assistant", "content": "<think>"}]
SHAPE: Any = {"type": "json_schema", "json_schema": {"name": "shape", "schema": {"enum": [7, "ab"]}}}
TOOL: Any = {"type": "function", "function": {"name": "clock"}}
ASKED: dict[str, Any] = {
    "messages": OPENED,
    "n": 2,
    "max_tokens": 100,
    "seed": 3,
    "extra_body": {"continue_final_message": True, "thinking_token_budget": BUDGET},
}


def reasoning_in(chunks: list[Any], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)


def content_in(chunks: list[Any], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_an_answer_fits_its_schema_after_bounded_reasoning(caller: Caller) -> None:
    answer = caller.chat(**ASKED, response_format=SHAPE)
    chunks = caller.chat_chunks(**ASKED, response_format=SHAPE)
    for each in answer.choices:
        assert json.loads(each.message.content) in (7, "ab")
        assert each.message.reasoning_content and "think" not in each.message.reasoning_content
        assert reasoning_in(chunks, each.index) == each.message.reasoning_content
        assert content_in(chunks, each.index) == each.message.content
    # The end marker, which counts as reasoning, follows after the budget, in one token for each of its bytes at most.
    num_reasoning = answer.usage.completion_tokens_details.reasoning_tokens
    assert 2 * BUDGET < num_reasoning <= 2 * (BUDGET + len("</think>"))
    assert num_reasoning < answer.usage.completion_tokens


def test_a_call_that_must_come_follows_the_reasoning(caller: Caller) -> None:
    answer = caller.chat(**ASKED, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    for each in answer.choices:
        (call,) = each.message.tool_calls
        assert (call.function.name, each.finish_reason) == ("clock", "tool_calls")
        assert json.loads(call.function.arguments) == {}
        assert each.message.reasoning_content and each.message.content is None


def test_thinking_of_a_message_is_bounded_and_a_call_follows_it(gateway: GatewayHere) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": OPENED, "max_tokens": 100, "seed": 3}
    asked["thinking"] = {"type": "enabled", "budget_tokens": BUDGET}
    asked["tools"] = [{"name": "clock", "input_schema": {"type": "object", "additionalProperties": False}}]
    asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    message = gateway.ask("POST", "/v1/messages", asked).json
    thinking, call = message["content"]
    assert thinking["type"] == "thinking" and thinking["thinking"] and "think" not in thinking["thinking"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "clock", {})
    assert message["stop_reason"] == "tool_use"
    num_thinking = message["usage"]["output_tokens_details"]["thinking_tokens"]
    assert BUDGET < num_thinking <= BUDGET + len("</think>") and num_thinking < message["usage"]["output_tokens"]
    (silent,) = gateway.ask("POST", "/v1/messages", {**asked, "thinking": {"type": "disabled"}}).json["content"]
    assert silent["type"] == "tool_use"
