"""/v1/chat/completions, called with the `openai` package, in front of a real prefill and decode service."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton import ChatMessage, Client, ToolCall
from baton.v1.inference_pb2 import (
    FINISH_REASON_EOS,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP_STRING,
    FINISH_REASON_STOP_TOKEN,
    GenerateEvent,
)
from gateway.apis.chat import parse_chat
from gateway.errors import ApiError
from gateway.plan import ChatInput
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.callers import Caller
from tests.gateway.gateway_here import COMPLETIONS, GatewayHere

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the other thing"},
]
CHAT = [ChatMessage("system", "Be brief."), ChatMessage("user", "the other thing")]
GREEDY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def direct(pair: Client) -> Any:
    """The answer that the gRPC client gets to the same request."""
    return pair.complete(chat=CHAT, temperature=0.0, max_tokens=24)


def test_an_answer_has_the_tokens_the_grpc_client_gets(caller: Caller, direct: Any) -> None:
    answer = caller.chat(**GREEDY, extra_body=IDS)
    (choice,) = answer.choices
    assert choice.token_ids == list(direct.token_ids)
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", direct.text)
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.usage.model_dump(
        exclude_none=True, exclude={"prompt_tokens_details", "completion_tokens_details"}
    ) == {
        "prompt_tokens": direct.usage.num_prompt_tokens,
        "completion_tokens": 24,
        "total_tokens": direct.usage.num_prompt_tokens + 24,
    }


def test_a_stream_has_the_same_tokens_in_chunks(caller: Caller, direct: Any) -> None:
    chunks = caller.chat_chunks(**GREEDY, extra_body=IDS)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    first, *parts, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(part.delta.content for part in parts) == direct.text
    assert [token_id for part in parts for token_id in part.token_ids] == list(direct.token_ids)
    assert {part.finish_reason for part in parts} == {None}
    assert (last.delta.content, last.finish_reason) == (None, "length")
    assert all(chunk.usage is None for chunk in chunks)
    assert len(parts) > 1


def test_a_stream_is_server_sent_events_that_end_with_done(gateway: GatewayHere) -> None:
    answer = gateway.ask("POST", "/v1/chat/completions", {**GREEDY, "model": "tiny", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.startswith(b"data: {") and answer.chunks


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": None, "refusal": "no"}, "no"),
        ({"refusal": "no"}, "no"),
        ({"content": "", "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        (
            {"content": [{"type": "text", "text": "I"}, {"type": "refusal", "refusal": "won't"}], "refusal": None},
            "I\nwon't",
        ),
        ({"content": None}, ""),
        ({"content": None, "refusal": None, "tool_calls": [], "function_call": None, "audio": None}, ""),
        ({"content": "yes", "refusal": ""}, "yes"),
        ({"content": "I", "refusal": "won't"}, "I\nwon't"),
        (
            {"content": [{"type": "text", "text": "I", "id": "lc_1"}, {"type": "refusal", "refusal": "won't"}]},
            "I\nwon't",
        ),
    ],
)
def test_what_an_assistant_refused_with_is_what_it_said(message: dict[str, Any], said: str) -> None:
    body = {"model": "tiny", "messages": [*MESSAGES, {"role": "assistant", **message}, MESSAGES[-1]]}
    (prompt,) = parse_chat(json.dumps(body).encode()).prompts
    assert isinstance(prompt, ChatInput)
    assert prompt.messages[len(MESSAGES)] == ChatMessage("assistant", said)


@pytest.mark.parametrize(
    ("parts", "reasoning"),
    [
        ([{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "yes"}], "Hm."),
        ([{"type": "thinking", "thinking": "Hm.", "closed": True, "index": 0}, {"type": "text", "text": "yes"}], "Hm."),
        ([{"type": "text", "text": "yes"}, {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}], "Hm."),
        ([{"type": "thinking", "thinking": each} for each in "ab"] + [{"type": "text", "text": "yes"}], "a\nb"),
    ],
)
def test_parts_that_are_thoughts_are_the_assistant_s_reasoning(parts: list[Any], reasoning: str) -> None:
    body = {"model": "tiny", "messages": [*MESSAGES, {"role": "assistant", "content": parts}, MESSAGES[-1]]}
    (prompt,) = parse_chat(json.dumps(body).encode()).prompts
    assert isinstance(prompt, ChatInput)
    assert prompt.messages[len(MESSAGES)] == ChatMessage("assistant", "yes", reasoning=reasoning)
    body["messages"][len(MESSAGES)]["reasoning"] = "That."
    (prompt,) = parse_chat(json.dumps(body).encode()).prompts
    assert isinstance(prompt, ChatInput) and prompt.messages[len(MESSAGES)].reasoning == "That."
    body["messages"][len(MESSAGES)]["content"] = [*parts, {"type": "text", "text": 1}]
    with pytest.raises(ApiError, match=rf"^messages\[{len(MESSAGES)}\]\.content\[{len(parts)}\]\.text: must be"):
        parse_chat(json.dumps(body).encode())


def called(id: str, arguments: str = '{"a": 1}', **fields: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}, **fields}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "let me see", "reasoning": None, "reasoning_details": [{}]}, "let me see"),
        ({"content": [{"type": "text", "text": "let me see"}], "refusal": None, "function_call": None}, "let me see"),
        ({"refusal": "no"}, "no"),
        ({"content": "7", "parsed": 7, "provider_specific_fields": {"reasoning": "Hm."}, "thinking_blocks": [{}]}, "7"),
    ],
    ids=["null", "absent", "text", "parts", "refusal", "libraries"],
)
def test_an_assistant_s_calls_are_part_of_what_it_said(message: dict[str, Any], expected: str) -> None:
    calls = [called("x"), called("y", arguments="", index=1, cache_control={}, provider_specific_fields={})]
    calls[0]["function"] |= {"parsed_arguments": {"a": 1}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief.", "cache_control": {"type": "ephemeral"}, "metadata": {}},
        {"role": "user", "content": [{"type": "text", "text": "the other thing"}, {"type": "text", "text": "Now."}]},
    ]
    messages.append({"role": "assistant", "tool_calls": calls, **message})
    messages.append({"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "7"}]})
    messages.append({"role": "tool", "tool_call_id": "y", "content": "8", "name": "sum"})
    (prompt,) = parse_chat(json.dumps({"model": "tiny", "messages": messages}).encode()).prompts
    assert isinstance(prompt, ChatInput)
    assert prompt.messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "the other thing\nNow."),
        ChatMessage("assistant", expected, (ToolCall("add", '{"a": 1}', "x"), ToolCall("add", "", "y"))),
        ChatMessage("tool", "7", tool_call_id="x"),
        ChatMessage("tool", "8", tool_call_id="y", name="sum"),
    )
    assert prompt.num_bytes > sum(map(len, ('{"a": 1}', "add", "add", "x", "y", "x", "y", "sum", expected)))


@pytest.mark.parametrize("other", ["", None])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_assistant_s_reasoning_has_two_names(name: str, other: str | None) -> None:
    said = {"reasoning": other, "reasoning_content": other, name: "Hm."}
    messages = [*MESSAGES, {"role": "assistant", "content": "So.", **said}, MESSAGES[-1]]
    (prompt,) = parse_chat(json.dumps({"model": "tiny", "messages": messages}).encode()).prompts
    assert isinstance(prompt, ChatInput)
    assert prompt.messages[len(MESSAGES)] == ChatMessage("assistant", "So.", reasoning="Hm.")


def test_an_answer_s_message_may_be_sent_back_as_it_came(edge: GatewayHere, scripted: ScriptedServer) -> None:
    """Agents send a message back with all its fields, including those that the `openai` package does not know."""
    scripted.inference.script = [
        *(started(), delta([1], '<think>Hm.</think>So.<tool_call>{"name": "add", "arguments": {}}</tool_call>')),
        finished(FINISH_REASON_EOS),
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    options: dict[str, Any] = {"model": "demo", "tools": tools}
    answer = edge.openai().chat.completions.create(messages=MESSAGES, **options).choices[0].message
    tool = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "7"}
    edge.openai().chat.completions.create(messages=[*MESSAGES, answer, tool], **options)
    scripted.inference.requests.get(timeout=BOUND_S)
    *_, sent, _ = scripted.inference.requests.get(timeout=BOUND_S).chat.messages
    assert (sent.role, sent.content, sent.reasoning) == ("assistant", "So.", "Hm.")
    assert [(call.name, call.arguments) for call in sent.tool_calls] == [("add", "{}")]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (finished(FINISH_REASON_EOS), ("stop", None)),
        (finished(FINISH_REASON_STOP_STRING, stop_string="b"), ("stop", "b")),
        (finished(FINISH_REASON_STOP_TOKEN, stop_token_id=7), ("stop", 7)),
        (finished(FINISH_REASON_LENGTH), ("length", None)),
    ],
)
def test_an_answer_says_why_it_ended(
    edge: GatewayHere, scripted: ScriptedServer, end: GenerateEvent, expected: tuple[str, str | int | None]
) -> None:
    scripted.inference.script = [started(), delta([5], "a"), end]
    for path, prompt in ((COMPLETIONS, {"prompt": "hi"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        whole = edge.ask("POST", path, {"model": "demo", **prompt}).json
        *_, last = edge.ask("POST", path, {"model": "demo", **prompt, "stream": True}).chunks
        for answer in (whole, last):
            assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == expected


def test_the_request_id_is_the_callers_or_a_new_one(caller: Caller) -> None:
    answer = caller.chat(**GREEDY, extra_headers={"x-request-id": "mine-7"})
    assert (answer.id, answer._request_id) == ("chatcmpl-mine-7", "mine-7")
    first, second = caller.chat(**GREEDY), caller.chat(**GREEDY)
    assert first.id == f"chatcmpl-{first._request_id}" != second.id


def test_the_fingerprint_is_the_models(caller: Caller, pair: Client) -> None:
    answer = caller.chat(**GREEDY)
    assert answer.system_fingerprint == f"fp_{pair.model_info().digest[:16]}"
