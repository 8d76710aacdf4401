"""/v1/chat/completions, called with the `openai` package, in front of a real prefill and decode service."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton import ChatMessage, Client, ToolCall
from baton.v1.inference_pb2 import FINISH_REASON_EOS
from gateway.apis.chat import parse_chat
from gateway.plan import ChatPrompt
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.callers import Caller
from tests.gateway.gateway_here import GatewayHere
from tests.support.models import make_tokenizer

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


async def test_an_answer_has_the_tokens_the_grpc_client_gets(caller: Caller, direct: Any) -> None:
    answer = await caller.chat(**GREEDY, extra_body=IDS)
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


def test_the_decode_service_says_how_its_model_writes_calls(pair: Client) -> None:
    info = pair.model_info()
    assert (info.output_format, info.has_reasoning) == ("hermes", False), "its template has no tools"


async def test_a_stream_has_the_same_tokens_in_chunks(caller: Caller, direct: Any) -> None:
    chunks = await caller.chat_chunks(**GREEDY, extra_body=IDS)
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


async def test_each_chunk_has_the_usage_so_far_when_asked(caller: Caller, direct: Any) -> None:
    chunks = await caller.chat_chunks(**GREEDY, stream_options={"continuous_usage_stats": True})
    totals = [chunk.usage.completion_tokens for chunk in chunks]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {direct.usage.num_prompt_tokens}
    assert (totals[0], totals[-1], totals) == (0, 24, sorted(totals))
    assert all(chunk.choices for chunk in chunks), "the last chunk is for include_usage"
    assert len(set(totals)) > 2


async def test_a_stream_ends_with_its_usage_when_asked(caller: Caller, direct: Any) -> None:
    *chunks, last = await caller.chat_chunks(**GREEDY, stream_options={"include_usage": True})
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (direct.usage.num_prompt_tokens, 24)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_a_stream_is_server_sent_events_that_end_with_done(gateway: GatewayHere) -> None:
    answer = gateway.ask("POST", "/v1/chat/completions", {**GREEDY, "model": "tiny", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: {") for line in lines[:-2])


async def test_a_stop_string_ends_the_text_before_it(caller: Caller, direct: Any) -> None:
    stop = direct.text[5:7]
    where = direct.text.index(stop)
    for given in (stop, [stop, "never comes"]):
        answer = await caller.chat(**GREEDY, stop=given)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (direct.text[:where], "stop")
    chunks = await caller.chat_chunks(**GREEDY, stop=stop)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == direct.text[:where]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_words_and_tokens_may_be_ruled_out(caller: Caller) -> None:
    letters = make_tokenizer().convert_tokens_to_ids(list("bcdfg"))
    answer = await caller.chat(**GREEDY, extra_body={"allowed_token_ids": letters})
    content = answer.choices[0].message.content
    assert len(content) == 24 and set(content) <= set("bcdfg")

    word = content[4:6]
    answer = await caller.chat(**GREEDY, extra_body={"allowed_token_ids": letters, "bad_words": [word]})
    content = answer.choices[0].message.content
    assert len(content) == 24 and set(content) <= set("bcdfg") and word not in content


async def test_the_text_may_have_its_stop_string_and_special_tokens(caller: Caller, direct: Any) -> None:
    stop = direct.text[8:12]
    answer = await caller.chat(**GREEDY, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert answer.choices[0].message.content == direct.text[: direct.text.index(stop) + len(stop)]

    forced = {**GREEDY, "logit_bias": {"2": 100}, "max_tokens": 2}
    answer = await caller.chat(**forced, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert answer.choices[0].message.content == "<|end|><|end|>"


async def test_a_stop_token_id_ends_it(caller: Caller, direct: Any) -> None:
    answer = await caller.chat(**GREEDY, extra_body={"stop_token_ids": [direct.token_ids[3]], **IDS})
    first = direct.token_ids.index(direct.token_ids[3])
    assert answer.choices[0].token_ids == list(direct.token_ids[: first + 1])
    assert answer.choices[0].finish_reason == "stop"


async def test_the_end_of_text_is_a_stop(caller: Caller) -> None:
    answer = await caller.chat(**GREEDY, logit_bias={"2": 100})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
    answer = await caller.chat(**GREEDY, logit_bias={"2": 100}, extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (24, "length")


async def test_developers_are_the_system_and_text_parts_are_text(caller: Caller, direct: Any) -> None:
    parts = [{"type": "text", "text": "the other"}, {"type": "text", "text": " thing"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = await caller.chat(**{**GREEDY, "messages": messages})
    assert answer.choices[0].message.content == direct.text


async def test_an_answer_may_be_sent_back_as_the_package_gives_it(caller: Caller, pair: Client) -> None:
    first = (await caller.chat(**GREEDY)).choices[0].message
    messages = [*MESSAGES, first, {"role": "user", "content": "and then"}]
    second = await caller.chat(**{**GREEDY, "messages": messages})
    chat = [*CHAT, ChatMessage("assistant", first.content), ChatMessage("user", "and then")]
    assert second.choices[0].message.content == pair.complete(chat=chat, temperature=0.0, max_tokens=24).text


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": None, "refusal": "no"}, "no"),
        ({"refusal": "no"}, "no"),
        ({"content": "", "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        (
            {"content": [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "won't"}], "refusal": None},
            "I won't",
        ),
        ({"content": None}, ""),
        ({"content": None, "refusal": None, "tool_calls": [], "function_call": None, "audio": None}, ""),
        ({"content": "yes", "refusal": ""}, "yes"),
    ],
)
def test_what_an_assistant_refused_with_is_what_it_said(message: dict[str, Any], said: str) -> None:
    body = {"model": "tiny", "messages": [*MESSAGES, {"role": "assistant", **message}, MESSAGES[-1]]}
    (prompt,) = parse_chat(json.dumps(body).encode()).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[len(MESSAGES)] == ChatMessage("assistant", said)


async def test_a_history_may_hold_a_refusal(caller: Caller, pair: Client) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": None, "refusal": "no"}, {"role": "user", "content": "why?"}]
    answer = await caller.chat(**{**GREEDY, "messages": messages})
    chat = [*CHAT, ChatMessage("assistant", "no"), ChatMessage("user", "why?")]
    assert answer.choices[0].message.content == pair.complete(chat=chat, temperature=0.0, max_tokens=24).text


def called(id: str, name: str = "add", arguments: str = '{"a": 1}', **fields: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "let me see"}, "let me see"),
        ({"content": [{"type": "text", "text": "let me see"}], "refusal": None, "function_call": None}, "let me see"),
        ({"refusal": "no"}, "no"),
    ],
    ids=["null", "absent", "text", "parts", "refusal"],
)
def test_an_assistant_s_calls_are_part_of_what_it_said(message: dict[str, Any], expected: str) -> None:
    calls = [called("x"), called("y", arguments="", index=1)]
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": calls, **message}]
    messages.append({"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "7"}]})
    messages.append({"role": "tool", "tool_call_id": "y", "content": "8", "name": "sum"})
    (prompt,) = parse_chat(json.dumps({"model": "tiny", "messages": messages}).encode()).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[len(MESSAGES) :] == (
        ChatMessage("assistant", expected, (ToolCall("add", '{"a": 1}', "x"), ToolCall("add", "", "y"))),
        ChatMessage("tool", "7", tool_call_id="x"),
        ChatMessage("tool", "8", tool_call_id="y", name="sum"),
    )
    assert prompt.num_bytes > sum(map(len, ('{"a": 1}', "add", "add", "x", "y", "x", "y", "sum", expected)))


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


async def test_a_history_may_hold_calls_of_tools_and_their_answers(caller: Caller, pair: Client) -> None:
    asked = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called("x", "f"), called("y", "g")]},
        {"role": "tool", "tool_call_id": "y", "content": "of y"},
        {"role": "tool", "tool_call_id": "x", "content": "of x"},
    ]
    answer = await caller.chat(**{**GREEDY, "messages": asked})
    chat = [
        *CHAT,
        ChatMessage("assistant", tool_calls=[ToolCall("f", '{"a":1}', "0"), ToolCall("g", '{"a":1}', "1")]),
        ChatMessage("tool", "of x", tool_call_id="0"),
        ChatMessage("tool", "of y", tool_call_id="1"),
    ]
    direct = pair.complete(chat=chat, temperature=0.0, max_tokens=24)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (
        direct.text,
        direct.usage.num_prompt_tokens,
    )


async def test_max_completion_tokens_is_the_other_name_of_max_tokens(caller: Caller) -> None:
    answer = await caller.chat(messages=MESSAGES, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3


async def test_every_sampling_option_reaches_the_pair(caller: Caller, pair: Client) -> None:
    ours = pair.complete(
        chat=CHAT,
        seed=5,
        max_tokens=20,
        min_tokens=4,
        temperature=0.75,
        top_p=0.875,
        top_k=40,
        min_p=0.03125,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.25,
        logit_bias={20: 4.0},
    )
    answer = await caller.chat(
        messages=MESSAGES,
        seed=5,
        max_tokens=20,
        temperature=0.75,
        top_p=0.875,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={"20": 4},
        extra_body={"min_tokens": 4, "top_k": 40, "min_p": 0.03125, "repetition_penalty": 1.25, **IDS},
    )
    assert answer.choices[0].token_ids == list(ours.token_ids)


async def test_what_does_not_touch_the_output_is_taken(caller: Caller, direct: Any) -> None:
    answer = await caller.chat(
        **GREEDY,
        user="someone",
        metadata={"run": "7"},
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        extra_body={"top_k": -1, "tools": None, "speculate": False},
    )
    assert answer.choices[0].message.content == direct.text


SHAPE = {
    "type": "object",
    "properties": {"kind": {"enum": ["ab", "cd"]}, "size": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}


async def test_an_answer_fits_its_schema(caller: Caller) -> None:
    """The model is random, so only the schema can give the answer the form of this JSON."""
    answer = await caller.chat(
        **{**GREEDY, "max_tokens": 60},
        response_format={"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE, "strict": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"kind", "size"} and found["kind"] in ("ab", "cd") and 10 <= found["size"] <= 99


async def test_an_answer_is_a_json_object(caller: Caller) -> None:
    answer = await caller.chat(**{**GREEDY, "max_tokens": 60}, response_format={"type": "json_object"})
    content = answer.choices[0].message.content
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


async def test_the_request_id_is_the_callers_or_a_new_one(caller: Caller) -> None:
    answer = await caller.chat(**GREEDY, extra_headers={"x-request-id": "mine-7"})
    assert (answer.id, answer._request_id) == ("chatcmpl-mine-7", "mine-7")
    first, second = await caller.chat(**GREEDY), await caller.chat(**GREEDY)
    assert first.id == f"chatcmpl-{first._request_id}" != second.id


async def test_the_fingerprint_is_the_models(caller: Caller, pair: Client) -> None:
    answer = await caller.chat(**GREEDY)
    assert answer.system_fingerprint == f"fp_{pair.model_info().digest[:16]}"
