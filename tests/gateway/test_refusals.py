"""Tests that invalid or unsupported requests are refused with an OpenAI error object that names the field, and never
with 422.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from baton import Client
from tests.gateway.callers import Caller
from tests.gateway.gateway_here import Answer, GatewayHere
from tests.support.running_pair import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_BODY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
TEXT_BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
NAMED = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
BAD = {"type": "object", "properties": {"a": {"type": "strin"}}}


CALL: dict[str, Any] = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def function(**change: Any) -> dict[str, Any]:
    return {**CALL, "function": {**CALL["function"], **change}}


def tool(**change: Any) -> dict[str, Any]:
    return {"tools": [{**TOOL, "function": {**TOOL["function"], **change}}]}


def chosen(choice: Any) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": choice}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def calls(calls: Any, *answers: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, *answers]}


def part(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": TOOL, "tool_choice": "none"}, "tools", None),
        ({"tools": [TOOL] * 129}, "tools", None),
        ({"tools": [TOOL, "f"]}, "tools[1]", None),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", None),
        (tool(name=None), "tools[0].function.name", "missing_required_parameter"),
        (tool(name="a b"), "tools[0].function.name", None),
        (tool(name="f" * 65), "tools[0].function.name", None),
        (tool(description=7), "tools[0].function.description", None),
        (tool(strict=1), "tools[0].function.strict", None),
        (tool(parameters=[]), "tools[0].function.parameters", None),
        (tool(parameters={"properties": {}}), "tools[0].function.parameters", None),
        (tool(examples=[1]), "tools[0].function.examples", "unsupported_parameter"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", None),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tool_choice": NAMED}, "tool_choice", None),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", None),
        ({"tools": [TOOL], "tool_choice": 7}, "tool_choice", None),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", None),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_parameter"),
        (chosen({**NAMED, "function": {"name": "g"}}), "tool_choice.function.name", None),
        (chosen(allowed("often", NAMED)), "tool_choice.allowed_tools", None),
        (chosen(allowed("auto")), "tool_choice.allowed_tools.tools", None),
        (chosen(allowed("auto", {"type": "mcp"})), "tool_choice.allowed_tools.tools[0]", None),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls", None),
        (
            {**tool(parameters={"type": "object", "not": {}}), "tool_choice": "required"},
            "tools[0].function.parameters",
            None,
        ),
        ({**chosen("required"), "ignore_eos": True}, "ignore_eos", None),
        ({"continue_final_message": True}, "continue_final_message", None),
        ({"add_generation_prompt": "no"}, "add_generation_prompt", None),
        ({"functions": [TOOL["function"]], "tool_choice": "none"}, "functions", "unsupported_parameter"),
        ({"priority": -1}, "priority", None),
        ({"priority": 1 << 31}, "priority", None),
        ({"priority": False}, "priority", None),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
        ({"use_beam_search": 0}, "use_beam_search", "unsupported_parameter"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "unsupported_parameter"),
        ({"allowed_token_ids": []}, "allowed_token_ids", None),
        ({"bad_words": [""]}, "bad_words", None),
        ({"length_penalty": 0.5}, "length_penalty", "unsupported_parameter"),
        ({"add_special_tokens": True}, "add_special_tokens", "unsupported_parameter"),
        ({"chat_template_kwargs": {"thinks": False}}, "chat_template_kwargs", None),
        ({"enable_thinking": "no"}, "enable_thinking", None),
        ({"thinking": {"type": "often"}}, "thinking.type", None),
        ({"thinking": False}, "thinking", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 3}, "thinking_token_budget": 4}, "thinking", None),
        ({"reasoning": {"enabled": "no"}}, "reasoning.enabled", None),
        ({"reasoning": {"enabled": False}, "thinking": {"type": "enabled"}}, "thinking", None),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort", None),
        ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning.enabled", None),
        ({"enable_thinking": True, "thinking_token_budget": 0}, "thinking_token_budget", None),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking", None),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"functions": [TOOL["function"]]}, "functions", "unsupported_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", None),
        ({"response_format": {"type": "json_schema"}}, "response_format", None),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format", None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format", None),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio", "unsupported_parameter"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "unsupported_parameter"),
        ({"reasoning_effort": "much"}, "reasoning_effort", None),
        (part([IMAGE]), "messages[0].content[0]", "unsupported_parameter"),
        (part([{"type": "text"}]), "messages[0].content[0].text", None),
        (part(["hi"]), "messages[0].content[0]", None),
        (part(None), "messages[0].content", None),
        ({"messages": [*MESSAGES, {"role": "assistant"}]}, "messages[1].content", None),
        ({"messages": [*MESSAGES, {"role": "assistant", "refusal": 7}]}, "messages[1].refusal", None),
        (
            {"messages": [{"role": "user", "content": "x", "refusal": "y"}]},
            "messages[0].refusal",
            "unsupported_parameter",
        ),
        (part([{"type": "refusal", "refusal": "no"}]), "messages[0].content[0]", "unsupported_parameter"),
        (calls("x"), "messages[1].tool_calls", None),
        (calls(["x"]), "messages[1].tool_calls[0]", None),
        (calls([CALL, {**CALL, "id": None}]), "messages[1].tool_calls[1].id", "missing_required_parameter"),
        (calls([{**CALL, "id": ""}]), "messages[1].tool_calls[0].id", None),
        (calls([{**CALL, "type": "custom"}]), "messages[1].tool_calls[0].type", "unsupported_parameter"),
        (calls([{**CALL, "type": ["function"]}]), "messages[1].tool_calls[0].type", "unsupported_parameter"),
        (calls([{**CALL, "custom": {}}]), "messages[1].tool_calls[0].custom", "unsupported_parameter"),
        (calls([{**CALL, "function": None}]), "messages[1].tool_calls[0].function", None),
        (calls([function(name=None)]), "messages[1].tool_calls[0].function.name", "missing_required_parameter"),
        (calls([function(name="")]), "messages[1].tool_calls[0].function.name", None),
        (calls([function(arguments=None)]), "messages[1].tool_calls[0].function.arguments", None),
        (calls([function(arguments={"a": 1})]), "messages[1].tool_calls[0].function.arguments", None),
        (calls([function(output="x")]), "messages[1].tool_calls[0].function.output", "unsupported_parameter"),
        (calls([CALL, CALL]), "messages[1].tool_calls", None),
        (calls([CALL], {"role": "tool", "content": "7"}), "messages[2].tool_call_id", "missing_required_parameter"),
        (calls([CALL], {"role": "tool", "tool_call_id": 1, "content": "7"}), "messages[2].tool_call_id", None),
        (calls([CALL], {"role": "tool", "tool_call_id": "y", "content": "7"}), "messages[2].tool_call_id", None),
        (calls([CALL], {"role": "tool", "tool_call_id": "x"}), "messages[2].content", None),
        (calls([CALL], {"role": "tool", "tool_call_id": "x", "content": "7", "name": 7}), "messages[2].name", None),
        ({"messages": [{**MESSAGES[0], "tool_calls": [CALL]}]}, "messages[0].tool_calls", "unsupported_parameter"),
        ({"messages": [{**MESSAGES[0], "tool_call_id": "x"}]}, "messages[0].tool_call_id", "unsupported_parameter"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "function_call": CALL["function"]}]},
            "messages[1].function_call",
            "unsupported_parameter",
        ),
        ({"messages": [{"role": "function", "content": "7"}]}, "messages[0].role", "unsupported_parameter"),
        ({"messages": [{"role": "robot", "content": "7"}]}, "messages[0].role", None),
        ({"messages": [{"role": "user", "content": "x", "name": 7}]}, "messages[0].name", None),
        ({"messages": []}, "messages", None),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": "hi"}, "messages", None),
        ({"model": None}, "model", "missing_required_parameter"),
        ({"model": 7}, "model", None),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"temperature": "hot"}, "temperature", None),
        ({"temperature": -1}, "temperature", None),
        ({"top_p": 1.5}, "top_p", None),
        ({"presence_penalty": 3}, "presence_penalty", None),
        ({"frequency_penalty": -3}, "frequency_penalty", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens", None),
        ({"prompt_logprobs": 21}, "prompt_logprobs", None),
        ({"prompt_logprobs": -1}, "prompt_logprobs", None),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"max_completion_tokens": 3}, "max_tokens", None),
        ({"n": 0}, "n", None),
        ({"n": 33}, "n", None),
        ({"seed": 1 << 64}, "seed", None),
        ({"stop": ["x"] * 17}, "stop", None),
        ({"stop": 7}, "stop", None),
        ({"logit_bias": {"x": 1}}, "logit_bias", None),
        ({"logit_bias": {"5": 101}}, "logit_bias", None),
        ({"logit_bias": {str(i): 0 for i in range(2000)}}, "logit_bias", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"logprobs": 2}, "logprobs", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options", None),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other", "unknown_parameter"),
        ({"min_p": 2}, "min_p", None),
        ({"top_k": -2}, "top_k", None),
        ({"repetition_penalty": 0}, "repetition_penalty", None),
        ({"min_tokens": 3}, "min_tokens", None),
        ({"stop_token_ids": [100000]}, "stop_token_ids", None),
        ({"cache_salt": ""}, "cache_salt", None),
        ({"cache_salt": "x" * 129}, "cache_salt", None),
        ({"cache_salt": 7}, "cache_salt", None),
        ({"cache_prompt": 1}, "cache_prompt", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_of_a_chat(gateway: GatewayHere, change: dict[str, Any], param: str, code: str | None) -> None:
    assert_refused(gateway.ask("POST", CHAT, {**CHAT_BODY, **change}), param, code)


def assert_refused(answer: Answer, param: str, code: str | None) -> None:
    error = answer.error
    assert (answer.status, error["type"]) == (400, "invalid_request_error"), error
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": [TOOL]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "unsupported_parameter"),
        ({"echo": 1}, "echo", None),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"best_of": 3, "stream": True}, "best_of", None),
        ({"best_of": 1, "n": 2}, "best_of", None),
        ({"add_special_tokens": False}, "add_special_tokens", "unsupported_parameter"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": []}, "prompt", None),
        ({"prompt": [[]]}, "prompt", None),
        ({"prompt": ["a", 1]}, "prompt", None),
        ({"prompt": [1.5]}, "prompt", None),
        ({"prompt": [True]}, "prompt", None),
        ({"prompt": [-1]}, "prompt", None),
        ({"prompt": [[1], [-1]]}, "prompt[1]", None),
        ({"prompt": [100000]}, "prompt", None),
        ({"prompt": ["a"] * 33}, "prompt", None),
        ({"prompt": ["a"] * 20, "n": 2}, "n", None),
        ({"logprobs": 21}, "logprobs", None),
        ({"cache_salt": ""}, "cache_salt", None),
        ({"messages": MESSAGES}, "messages", "unknown_parameter"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "unsupported_parameter"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_of_a_completion(gateway: GatewayHere, change: dict[str, Any], param: str, code: str | None) -> None:
    assert_refused(gateway.ask("POST", COMPLETIONS, {**TEXT_BODY, **change}), param, code)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"a": "\\ud8"}'])
def test_a_body_that_is_no_json_object(gateway: GatewayHere, body: bytes) -> None:
    answer = gateway.ask("POST", CHAT, body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


def test_a_body_that_nests_too_deeply(gateway: GatewayHere) -> None:
    answer = gateway.ask("POST", CHAT, b"[" * 100_000)
    assert (answer.status, answer.error["message"], answer.error["code"]) == (400, "the body nests too deeply", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_format": "json"}, "response_format: must be an object"),
        ({"logit_bias": 7}, "logit_bias: must be an object"),
        ({"messages": []}, "messages: must not be empty"),
        ({"response_format": {"type": "text", "other": 1}}, "response_format.other: is unknown"),
        ({"response_format": {}}, "response_format.type: is required"),
        ({"max_tokens": -1}, "max_tokens: -1 is not in [0, 4294967295]"),
        ({"top_k": -5}, "top_k: -5 is not in [-1, 4294967295]"),
        ({"logit_bias": {"99999": 1}}, "logit_bias: id 99999 is not in the vocabulary of 268"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: -1 is not in [0, 4294967295]"),
    ],
)
def test_a_message_says_what_a_value_must_be(gateway: GatewayHere, change: dict[str, Any], message: str) -> None:
    assert gateway.ask("POST", CHAT, {**CHAT_BODY, **change}).error["message"] == message


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"messages": MESSAGES, "tool_choice": NAMED, **tool(parameters=BAD)}, "tools[0].function.parameters"),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "function", "name": "f", "strict": True, "parameters": BAD}]},
            "tools[0].parameters",
        ),
        (
            "/v1/messages",
            {
                "messages": MESSAGES,
                "max_tokens": 2,
                "tools": [{"name": "e", "input_schema": {"type": "object"}}, {"name": "f", "input_schema": BAD}],
                "tool_choice": {"type": "tool", "name": "f"},
            },
            "tools[1].input_schema",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "tools": [TOOL], "response_format": {"type": "json_schema", "schema": BAD}},
            "response_format",
        ),
    ],
)
def test_a_bad_schema_of_a_tool_or_of_an_answer_beside_it_is_named(
    gateway: GatewayHere, path: str, change: dict[str, Any], param: str
) -> None:
    error = gateway.ask("POST", path, {"model": "tiny", **change}).json["error"]
    assert error["message"].startswith(f'{param}: properties.a.type: "strin" is none of string, ')


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ('"max_tokens": 1, "max_tokens": 2', "max_tokens"),
        ('"user": "a", "user": "a"', "user"),
        ('"documents": [{"content": "yes", "content": "no"}]', "content"),
        ('"stream_options": {"include_usage": true, "include_usage": false}', "include_usage"),
        ('"metadata": {"a": {"b": 1, "b": 2}}', "b"),
    ],
)
def test_a_name_that_comes_twice(gateway: GatewayHere, more: str, param: str) -> None:
    """A proxy that checked the body before the gateway may have read the other value."""
    answer = gateway.ask("POST", CHAT, f"{json.dumps(CHAT_BODY)[:-1]}, {more}}}".encode())
    assert answer.status == 400
    assert (answer.error["param"], answer.error["code"]) == (param, "invalid_json")


def test_very_many_fields(gateway: GatewayHere) -> None:
    answer = gateway.ask("POST", CHAT, {**CHAT_BODY, **{f"x{i}": 1 for i in range(1000)}})
    assert answer.status == 400


def test_a_body_that_does_not_say_it_is_json(gateway: GatewayHere) -> None:
    """A web page could make a browser send such a request to a gateway on its user's machine."""
    answer = gateway.ask("POST", CHAT, b"{}", content_type="text/plain")
    assert (answer.status, answer.error["param"]) == (415, "content-type")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"prompt": [10] * 5000}, "prompt", "your prompt resulted in 5000 tokens"),
        (COMPLETIONS, {"prompt": ["a", "a " * 6000], "n": 2}, "prompt[1]", "your prompt[1] resulted in "),
        (
            COMPLETIONS,
            {"prompt": [10] * 10, "max_tokens": 4096},
            "max_tokens",
            "you requested 4106 tokens (10 in the prompt, 4096 in the completion)",
        ),
        (CHAT, {**part("q" * 6000)}, "messages", "your messages resulted in "),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 4096}, "max_completion_tokens", "you requested "),
    ],
    ids=["prompt", "one of several prompts", "output", "messages", "a chat's output"],
)
def test_what_exceeds_the_context_is_said_in_openais_words(
    gateway: GatewayHere, path: str, body: dict[str, Any], param: str, words: str, is_streamed: bool
) -> None:
    answer = gateway.ask("POST", path, {"model": "tiny", **body, "stream": is_streamed})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", param)
    most = pair_context(gateway)
    assert answer.error["message"].startswith(f"This model's maximum context length is {most} tokens. However, {words}")
    assert "context_length_exceeded" in answer.error["message"]


def pair_context(gateway: GatewayHere) -> int:
    (card,) = gateway.ask("GET", "/v1/models").json["data"]
    return int(card["max_model_len"])


def test_the_package_raises_its_own_errors(caller: Caller) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        caller.chat(model="gpt-4o", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    for ask in (caller.chat, caller.chat_chunks):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(messages=MESSAGES, temperature=-1)
        assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"frequency_penalty": 2.3}, "frequency_penalty: 2.3 is not in [-2, 2]"),
        (CHAT, {"min_p": 1.1}, "min_p: 1.1 is not in [0, 1]"),
        (CHAT, {"top_p": 1.0000001}, "top_p: 1.0000001 is not in [0, 1]"),
        (CHAT, {"top_p": -1e-50}, "top_p: -1e-50 is not in [0, 1]"),
        (CHAT, {"frequency_penalty": 1e39}, "frequency_penalty: 1e+39 is too large for a float32"),
        (CHAT, {"logit_bias": {"1": -1e39}}, "logit_bias: -1e+39 is too large for a float32"),
        (CHAT, {"priority": 1 << 31}, "priority: 2147483648 is not in [-2147483648, 2147483647]"),
        ("/v1/completions", {"prompt": [3, -5]}, "prompt: -5 at index 1 is no token id"),
        ("/v1/completions", {"prompt": [[1], [1 << 32]]}, "prompt[1]: 4294967296 at index 0 is no token id"),
        (CHAT, {"stop": ["a", ""]}, "stop: has 0 characters at index 1, each must have 1 to 256"),
        (CHAT, {"presence_penalty": -2.0000001}, "presence_penalty: -2.0000001 is not in [-2, 2]"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt: is empty at index 1"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt: is empty at index 1"),
        (CHAT, {"logit_bias": {"1": 1, "5": 100.1}}, "logit_bias: 100.1 of id 5 is not in [-100, 100]"),
        (CHAT, {"logit_bias": {"1": 1, "foo": 1}}, "logit_bias: 'foo' is no token id, as its keys must be"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role: is required"),
        (
            CHAT,
            {"messages": [{"role": "bot", "content": "hi"}]},
            'messages[0].role: "bot" is none of system, developer, user, assistant, tool',
        ),
        (CHAT, {"n": 0}, "n: input should be greater than or equal to 1, not 0"),
        (CHAT, {"temperature": "0.7"}, 'temperature: input should be a valid number, not "0.7"'),
        (CHAT, {"stop_token_ids": ["a"]}, "stop_token_ids[0]: input should be a valid integer"),
        (CHAT, {"stop": 7}, "stop: input should be a string or a list of strings, not 7"),
        (CHAT, {"stop_token_ids": [5] * 70}, "stop_token_ids: 70 ids are more than 63"),
        (CHAT, {"logit_bias": dict.fromkeys(map(str, range(513)), 1)}, "logit_bias: 513 entries are more than 512"),
        (CHAT, {"cache_salt": "x" * 129}, "cache_salt: has 129 characters, must have 1 to 128"),
        (
            CHAT,
            {"max_tokens": 2, "max_completion_tokens": 3},
            "max_tokens: 2 differs from 3 of max_completion_tokens, its other name",
        ),
        (CHAT, {"tools": [TOOL] * 129}, "tools: 129 are more than 128"),
        (CHAT, {"tools": [TOOL, TOOL]}, "tools[1].function.name: 'f' is another tool's too"),
        (
            CHAT,
            tool(name="a b"),
            'tools[0].function.name: must be 1 to 64 letters, digits, underscores and hyphens, not "a b"',
        ),
        (
            CHAT,
            tool(name="f" * 70),
            "tools[0].function.name: must be 1 to 64 letters, digits, underscores and hyphens, not 70 characters",
        ),
        (CHAT, part([{"type": "Text"}]), 'messages[0].content[0]: "Text" is not served, text is'),
        (CHAT, calls([CALL] * 129), "messages[1].tool_calls: 129 calls are more than 128"),
        (
            CHAT,
            calls([CALL], {"role": "tool", "tool_call_id": "y", "content": "7"}),
            "messages[2].tool_call_id: 'y' is of no call in the assistant's message before it, "
            "or of one that is answered",
        ),
        (CHAT, {"stop": ["x", "y" * 70, 7]}, "stop[2]: input should be a valid string, not 7"),
        (CHAT, {"messages": "a prompt"}, "messages: input should be a valid list"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema: must be a JSON schema: an object, or its text",
        ),
        (CHAT, {"tools": [{**TOOL, "strict": True}]}, "tools[0].strict: is not served, strict inside function is"),
        (
            "/v1/responses",
            {"input": "hi", "tools": [TOOL]},
            "tools[0].function: is not served, its fields beside type are",
        ),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name: 'g' is no tool's name, 'f' is",
        ),
        (
            CHAT,
            {"continue_final_message": True},
            "continue_final_message: the last message must be an assistant's, with words and without calls: "
            "it is a user's",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            "input[0].content[0]: text is not served, input_text and output_text and refusal are",
        ),
        (
            "/v1/responses",
            {"input": "hi", "include": ["x"]},
            'include[0]: is not served, "message.output_text.logprobs" and "reasoning.encrypted_content" are',
        ),
        ("/v1/responses", {"input": ""}, "input: is empty"),
        ("/v1/responses", {"input": [{"type": "message", "content": "a"}]}, "input[0].role: is required"),
        (
            "/v1/responses",
            {"input": "hi", "metadata": {"a": "b" * 513}},
            "metadata: 'a' has 513 characters, more than 512",
        ),
        (
            "/v1/responses",
            {"input": [{}]},
            "input[0].type: is missing: message, function_call, function_call_output, reasoning are",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c1", "output": "blue", "name": 5}]},
            "input[0].name: must be a string",
        ),
        (
            "/v1/responses",
            {"input": "hi", "reasoning_effort": "low"},
            "reasoning_effort: is not served, reasoning.effort is",
        ),
    ],
)
def test_words_name_what_was_sent_and_what_would_do(
    gateway: GatewayHere, path: str, fields: dict[str, Any], words: str
) -> None:
    said = {} if "input" in fields or "prompt" in fields else {"messages": MESSAGES}
    refused = gateway.ask("POST", path, {"model": "tiny", **said, **fields})
    assert (refused.status, refused.error["message"]) == (400, words)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/embeddings", 404, "unknown_url"),
        ("POST", "/nope", 404, "unknown_url"),
        ("POST", "/v1/chat/completions//", 404, "unknown_url"),
        ("GET", CHAT, 405, "wrong_method"),
        ("DELETE", "/v1/models", 405, "wrong_method"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
def test_routes_and_methods_that_are_not_there(
    gateway: GatewayHere, method: str, path: str, status: int, code: str
) -> None:
    answer = gateway.ask(method, path)
    assert (answer.status, answer.error["code"]) == (status, code)


def test_the_message_says_that_v1_is_there_twice(gateway: GatewayHere) -> None:
    error = gateway.ask("POST", f"/v1{CHAT}", CHAT_BODY).error
    assert error["message"].startswith(f"POST /v1{CHAT} is not served: the base URL has /v1 already")


@pytest.mark.parametrize(
    ("path", "field", "value", "message"),
    [
        ("/v1/responses", "messages", MESSAGES, "is unknown, its name here is input"),
        ("/v1/responses", "max_tokens", 1, "is unknown, its name here is max_output_tokens"),
        ("/v1/responses", "response_format", {}, "is unknown, its name here is text.format"),
        (CHAT, "max_output_tokens", 1, "is unknown, its name here is max_completion_tokens"),
        (COMPLETIONS, "max_completion_tokens", 1, "is unknown, its name here is max_tokens"),
        (CHAT, "functions", [TOOL["function"]], "is not served, tools is"),
        (CHAT, "function_call", {"name": "f"}, "is not served, tool_choice is"),
        (COMPLETIONS, "functions", [TOOL["function"]], 'is not served, unless function_call is "none"'),
    ],
)
def test_the_message_has_the_fields_name_here(
    gateway: GatewayHere, path: str, field: str, value: Any, message: str
) -> None:
    error = gateway.ask("POST", path, {"model": "tiny", field: value}).error
    assert (error["param"], error["message"]) == (field, f"{field}: {message}")


def test_a_request_id_that_cannot_travel(gateway: GatewayHere) -> None:
    for bad in ("x" * 97, "a b"):
        answer = gateway.ask("POST", CHAT, CHAT_BODY, x_request_id=bad)
        assert (answer.status, answer.error["param"]) == (400, "x-request-id")


def test_the_pair_is_untouched_by_all_of_it(gateway: GatewayHere, pair: Client) -> None:
    assert gateway.ask("POST", CHAT, CHAT_BODY).status == 200
    wait_until(lambda: pair.load().num_running == 0)  # a step tells its load after its events
