"""Anthropic's Messages API: what a request becomes, the message and its events, errors, keys, and counted tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2

from baton import ChatMessage, Client, Tool, ToolChoice
from baton.errors import InvalidArgument
from baton.v1.inference_pb2 import (
    FINISH_REASON_EOS,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP_STRING,
    FINISH_REASON_STOP_TOKEN,
    GenerateEvent,
    SpeculationCounts,
)
from common.text.chat_messages import ToolCall
from gateway.apis.chat import parse_chat
from gateway.apis.messages import MESSAGES as API
from gateway.apis.messages import parse_message
from gateway.apis.responses import parse_response
from gateway.conversation import MAX_MESSAGES, MAX_TOOL_CALLS
from gateway.errors import ApiError, api_error_of
from gateway.plan import ChatInput, Plan
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started
from tests.gateway.answers import answered, joined, message_of
from tests.gateway.gateway_here import Answer, GatewayHere, gateway_here, key_file
from tests.gateway.test_tools import SIZE, assert_fits
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "the other thing"}]
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 8, "messages": USER}
PICK: dict[str, Any] = {"name": "pick", "description": "Picks one.", "input_schema": SIZE}
CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "call_1", "name": "clock", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "noon"}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """Returns the events of a stream, each of which has its type as its name."""
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    names = [line for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [f"event: {event['type']}" for event in answer.events]
    return answer.events


def both(
    gateway: GatewayHere, scripted: ScriptedServer | None = None, script: Sequence[Any] = (), **fields: Any
) -> Any:
    """Asks for a message, whole and streamed, checks that both are the same but for ids of calls, and returns it."""
    answers = []
    for stream in (False, True):
        if scripted is not None:
            scripted.inference.scripts.append(script)
        answer = gateway.ask("POST", MESSAGES, {**BODY, "seed": 7, **fields, "stream": stream}, x_request_id="r")
        assert answer.status == 200, answer.body
        answers.append(message_of(events_of(answer)) if stream else answer.json)
    whole, streamed = answers
    assert without_ids(streamed) == without_ids(whole)
    return whole


def without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message without ids of calls, and with all tokens of its prompt counted as not cached."""
    usage = {**message["usage"], "cache_read_input_tokens": 0}
    usage["input_tokens"] += message["usage"]["cache_read_input_tokens"]
    return {**message, "content": [{**block, "id": ""} for block in message["content"]], "usage": usage}


def prompt_of(**fields: Any) -> ChatInput:
    (prompt,) = parse_message(json.dumps({**BODY, **fields}).encode()).prompts
    assert isinstance(prompt, ChatInput)
    return prompt


# ---- what a request becomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;\nBe brief.", "Be brief."),
        ("x-anthropic-billing-header: cch=a1b2c; Be brief; be kind.", "Be brief; be kind."),
        ([text("x-anthropic-billing-header: cch=a1b2c;\nBe brief. "), text("Be kind.")], "Be brief. Be kind."),
        ("What is an x-anthropic-billing-header: a=b;?", "What is an x-anthropic-billing-header: a=b;?"),
        ("x-anthropic-billing-header: cch=a1b2c;", ""),
        ("x-anthropic-billing-header: cc_version=2.1; cch=0\nYou", "You"),
        ("\nx-anthropic-billing-header: cc_version=2.1", ""),
        ("x-anthropic-billing-header: explain it", "x-anthropic-billing-header: explain it"),
    ],
)
def test_what_an_agent_says_to_its_biller_is_left_out_and_nothing_else(system: Any, words: str) -> None:
    messages = prompt_of(system=system, messages=[{"role": "user", "content": "Hi"}]).messages
    assert "".join(message.content for message in messages[:-1]) == words


BILLED = "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_message, {"messages": [{"role": "system", "content": [text(BILLED), text("Be brief.")]}, *USER]}),
        (parse_chat, {"messages": [{"role": "system", "content": [text(BILLED), text("Be brief.")]}, *USER]}),
        (parse_response, {"input": [{"role": "developer", "content": f"{BILLED}\nBe brief."}, *USER]}),
        (parse_response, {"instructions": f"{BILLED}\nBe brief.", "input": USER}),
    ],
    ids=["messages", "chat", "responses", "instructions"],
)
def test_it_is_left_out_too_where_a_proxy_sends_it_on(parse: Callable[[bytes], Plan], body: dict[str, Any]) -> None:
    needed = {"max_tokens": 8} if parse is parse_message else {}
    (prompt,) = parse(json.dumps({"model": "demo", **needed, **body}).encode()).prompts
    assert isinstance(prompt, ChatInput)
    assert prompt.messages == (ChatMessage("system", "Be brief."), ChatMessage("user", USER[0]["content"]))


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_message, {"messages": [{"role": "system", "content": [text(BILLED)]}, *USER]}),
        (parse_chat, {"messages": [{"role": "system", "content": BILLED}, *USER]}),
        (parse_response, {"input": [{"role": "developer", "content": BILLED}, *USER]}),
        (parse_response, {"instructions": BILLED, "input": USER}),
    ],
    ids=["messages", "chat", "responses", "instructions"],
)
def test_a_message_that_is_nothing_else_is_left_out(parse: Callable[[bytes], Plan], body: dict[str, Any]) -> None:
    needed = {"max_tokens": 8} if parse is parse_message else {}
    (prompt,) = parse(json.dumps({"model": "demo", **needed, **body}).encode()).prompts
    assert isinstance(prompt, ChatInput)
    assert prompt.messages == (ChatMessage("user", USER[0]["content"]),)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("chat.messages[0]", "messages[0]"),
        ("chat.messages[1]", "messages[2]"),
        ("chat.messages[1].tool_calls[0].id", "messages[2].tool_calls[0].id"),
        ("chat.messages[2].tool_call_id", "messages[3].tool_call_id"),
    ],
)
def test_an_error_about_a_message_of_a_chat_after_one_that_is_left_out_names_the_one_that_was_sent(
    field: str, param: str
) -> None:
    messages = [*USER, {"role": "system", "content": BILLED}, *USER, *USER]
    params = parse_chat(json.dumps({"model": "demo", "messages": messages}).encode()).params
    assert api_error_of(InvalidArgument("is odd", metadata={"field": field}), params).param == param


def test_a_system_message_that_was_sent_empty_stays() -> None:
    body = {"model": "demo", "messages": [{"role": "system", "content": ""}, *USER]}
    (prompt,) = parse_chat(json.dumps(body).encode()).prompts
    assert isinstance(prompt, ChatInput)
    assert prompt.messages[0] == ChatMessage("system", "")


def test_a_conversation_becomes_a_chat() -> None:
    prompt = prompt_of(
        system=[
            text("x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"),
            *(text("Be brief. ", cache_control={"type": "ephemeral"}), text("Be kind.")),
        ],
        messages=[
            {"role": "user", "content": [text("What time"), text("is it?")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A clock.", "signature": "unsigned"},
                    {"type": "redacted_thinking", "data": "opaque"},
                    text("I look.", citations=None),
                    {**CALL, "input": {"zone": "é"}, "caller": {"type": "direct"}},
                    text("Then I tell."),
                ],
            },
            {"role": "user", "content": [{**RESULT, "content": [text("no"), text("on")]}, text("Well?")]},
        ],
    )
    assert prompt.messages == (
        ChatMessage("system", "Be brief. Be kind."),
        ChatMessage("user", "What time\nis it?"),
        ChatMessage(
            "assistant",
            "I look.\nThen I tell.",
            (ToolCall("clock", '{"zone": "é"}', "call_1"),),
            reasoning="A clock.",
        ),
        ChatMessage("tool", "no\non", tool_call_id="call_1"),
        ChatMessage("user", "Well?"),
    )
    assert (prompt.tools, prompt.options) == (None, {})


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"content": None}, ""),
        ({"is_error": False}, "noon"),
        ({"is_error": True}, "Error: noon"),
        ({"is_error": True, "content": []}, "Error"),
    ],
)
def test_a_tools_result_says_whether_it_is_an_error(result: dict[str, Any], words: str) -> None:
    said = [*USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [{**RESULT, **result}]}]
    assert prompt_of(messages=said).messages[-1] == ChatMessage("tool", words, tool_call_id="call_1")


def test_neighbouring_messages_of_one_role_are_one() -> None:
    other = {**CALL, "id": "call_2"}
    prompt = prompt_of(
        messages=[
            *({"role": "user", "content": "a"}, {"role": "user", "content": [text("b")]}),
            *({"role": "assistant", "content": [CALL]}, {"role": "assistant", "content": [text("c"), other]}),
            *(
                {"role": "user", "content": [RESULT]},
                {"role": "user", "content": [{**RESULT, "tool_use_id": "call_2"}]},
            ),
        ]
    )
    assert prompt.messages == (
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "c", (ToolCall("clock", "{}", "call_1"), ToolCall("clock", "{}", "call_2"))),
        ChatMessage("tool", "noon", tool_call_id="call_1"),
        ChatMessage("tool", "noon", tool_call_id="call_2"),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice(required=True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(required=True, parallel=False)),
        ({"type": "tool", "name": "pick"}, ToolChoice(required=True, names=("pick",), parallel=False)),
    ],
)
def test_a_choice_of_tools_is_what_anthropic_means_by_it(choice: Any, expected: ToolChoice) -> None:
    use = prompt_of(tools=[PICK, {**CLOCK, "type": "custom", "strict": True}], tool_choice=choice).tools
    assert use is not None and use.choice == expected
    schema = json.dumps(CLOCK["input_schema"])
    assert use.tools == (Tool("pick", "Picks one.", json.dumps(SIZE)), Tool("clock", "", schema, strict=True))
    assert prompt_of(tools=[PICK], tool_choice={"type": "none"}).tools is None


@pytest.mark.parametrize("is_older", [False, True])
def test_the_fields_travel(edge: GatewayHere, scripted: ScriptedServer, is_older: bool) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["ab"]}}}
    form = {"type": "json_schema", "schema": schema}
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "stop_sequences": ["a", "b"],
        "metadata": {"user_id": "someone"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"format": None if is_older else form, "effort": "low"},
        "output_format": form if is_older else None,
        "min_p": 0.125,
        "seed": 7,
        "cache_salt": "tenant",
        "priority": 7,
    }
    both(edge, scripted, [started(), finished()], **fields)
    request = scripted.inference.requests.get(timeout=BOUND_S)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (list(sampling.stop), sampling.max_tokens, sampling.seed) == (["a", "b"], 8, 7)
    assert sampling.reasoning.max_tokens == 5
    assert json.loads(sampling.json_schema) == schema
    assert json.loads(request.chat.chat_template_kwargs) == {"reasoning_effort": "low"}
    assert (request.cache_salt, request.priority) == ("tenant", 7)


@pytest.mark.parametrize(
    ("thinking", "limit"), [(None, None), ({"type": "adaptive", "display": None}, None), ({"type": "disabled"}, 0)]
)
def test_thinking_is_limited_when_asked(
    edge: GatewayHere, scripted: ScriptedServer, thinking: Any, limit: int | None
) -> None:
    both(edge, scripted, [started(), finished()], thinking=thinking)
    reasoning = scripted.inference.requests.get(timeout=BOUND_S).sampling.reasoning
    assert (reasoning.max_tokens if reasoning.HasField("max_tokens") else None) == limit


# ---- the message ------------------------------------------------------------------------------------------------


def test_a_stream_has_anthropics_events(edge: GatewayHere, scripted: ScriptedServer) -> None:
    deltas = [delta([place], piece) for place, piece in enumerate(["<think>Hm", ".</think>", "", "Hel", "lo"])]
    drafts = SpeculationCounts(num_drafted_tokens=4, num_accepted_tokens=3, num_forced_tokens=1)
    end = finished(FINISH_REASON_EOS, num_completion_tokens=5, num_cached_tokens=2, speculation=drafts)
    scripted.inference.script = [started(), *deltas, end]
    answer = edge.ask("POST", MESSAGES, {**BODY, "stream": True}, x_request_id="r")
    message = {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "output_tokens_details": {
                "thinking_tokens": 0,
                "draft_tokens": 0,
                "accepted_draft_tokens": 0,
                "forced_draft_tokens": 0,
            },
        },
    }
    usage = {
        **message["usage"],
        "input_tokens": 1,
        "cache_read_input_tokens": 2,
        "output_tokens": 5,
        "output_tokens_details": {
            "thinking_tokens": 0,
            "draft_tokens": 4,
            "accepted_draft_tokens": 3,
            "forced_draft_tokens": 1,
        },
    }

    def part(index: int, kind: str, **part: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **part}}

    block = {"type": "thinking", "thinking": "", "signature": ""}
    assert events_of(answer) == [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        part(0, "thinking_delta", thinking="Hm"),
        part(0, "thinking_delta", thinking="."),
        {"type": "ping"},
        part(0, "signature_delta", signature="unsigned"),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": text("")},
        part(1, "text_delta", text="Hel"),
        part(1, "text_delta", text="lo"),
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    whole = edge.ask("POST", MESSAGES, BODY, x_request_id="r").json
    content = [{**block, "thinking": "Hm.", "signature": "unsigned"}, text("Hello")]
    assert whole == {**message, "content": content, "stop_reason": "end_turn", "usage": usage}


def message(pieces: Sequence[str], **options: Any) -> dict[str, Any]:
    """Returns the message that an output in these pieces becomes. Checks that it is the same when it is streamed."""
    whole, events = answered(API, pieces, **options)
    assert without_ids(message_of(events)) == without_ids(whole)
    return whole


def test_blocks_come_in_the_order_in_which_the_model_wrote_them() -> None:
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    content = message([f"<think>Hm.</think>\n\nOne {call} two ", f"\n{call}{call}", " three\n"])["content"]
    assert [block.get("text", block["type"]) for block in content] == [
        *("thinking", "One", "tool_use", "two", "tool_use", "tool_use", "three\n")
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": Rome}',
        '{"city": "Rome",}',
        '{"city": NaN}',
        '{"city": 1e999}',
        '{"city": "\\ud800"}',
        '{"city": "a\nb"}',
        '{"city": ' + "[" * 500 + "]" * 500 + "}",
        '["Rome"]',
    ],
)
@pytest.mark.parametrize("order", ['{"name": "look_up", "arguments": %s}', '{"arguments": %s, "name": "look_up"}'])
def test_a_call_whose_arguments_are_no_object_is_text(order: str, arguments: str) -> None:
    output = f"<tool_call>\n{order % arguments}\n</tool_call>"
    made = message(output)
    assert (made["content"], made["stop_reason"]) == ([text(output)], "end_turn")


def test_a_call_that_the_length_cut_off_is_text() -> None:
    call = '<tool_call>{"name": "look_up", "arguments": {"city": "Rome"}}</tool_call>'
    cut = message(["Look: ", call, "and ", call[:-20]], reason=FINISH_REASON_LENGTH)
    assert [block.get("text", block.get("input")) for block in cut["content"]] == [
        *("Look:", {"city": "Rome"}, f"and {call[:-20]}")
    ]
    assert cut["stop_reason"] == "max_tokens"


def test_thinking_is_left_out_when_asked() -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}}
    assert message(["<think>Hm.</think>Yes."], **asked)["content"] == [text("Yes.")]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (finished(FINISH_REASON_STOP_STRING, stop_string="b"), ("stop_sequence", "b")),
        (finished(FINISH_REASON_STOP_TOKEN, stop_token_id=7), ("end_turn", None)),
        (finished(FINISH_REASON_LENGTH), ("max_tokens", None)),
    ],
)
def test_a_message_says_why_it_ended(
    edge: GatewayHere, scripted: ScriptedServer, end: GenerateEvent, expected: tuple[str, str | None]
) -> None:
    message = both(edge, scripted, [started(), delta([5], "a"), end])
    assert (message["stop_reason"], message["stop_sequence"]) == expected


# ---- in front of a real pair ------------------------------------------------------------------------------------


def test_calls_come_with_input_that_fits_and_their_results_go_back(gateway: GatewayHere) -> None:
    chosen = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"model": "tiny", "tools": [PICK, CLOCK], "max_tokens": 120}
    message = both(gateway, **asked, tool_choice=chosen, seed=3)
    (call,) = message["content"]
    assert_fits(call["name"], json.dumps(call["input"]))
    assert message["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [text("noon")]}
    history = [*USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    answer = both(gateway, **{**asked, "max_tokens": 4}, messages=history, tool_choice={"type": "none"}, temperature=0)
    assert answer["usage"]["output_tokens"] == 4 and answer["stop_reason"] == "max_tokens"


def test_a_message_of_the_assistant_is_continued(gateway: GatewayHere, pair: Client) -> None:
    messages = [*USER, {"role": "assistant", "content": [text("It"), text("is ")]}]
    message = both(gateway, model="tiny", messages=messages, temperature=0)
    prompt = "<|start|>user\nthe other thing<|end|>\n<|start|>assistant\nIt\nis "
    assert joined(message, "text") == pair.complete(prompt, temperature=0.0, max_tokens=8).text


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "Be brief."},
        {"tools": [PICK, CLOCK]},
        {"tools": [PICK], "tool_choice": {"type": "none"}},
        {"messages": [*USER, {"role": "assistant", "content": "It is "}]},
        {"messages": [*USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}]},
    ],
    ids=["system", "tools", "untold tools", "continued", "result"],
)
def test_counted_tokens_are_those_of_the_usage(gateway: GatewayHere, fields: dict[str, Any]) -> None:
    counted = gateway.ask("POST", COUNT, {"model": "tiny", "messages": USER, **fields})
    assert (counted.status, sorted(counted.json)) == (200, ["input_tokens"])
    num_tokens = counted.json["input_tokens"]
    usages = [both(gateway, **{"model": "tiny", "max_tokens": 1, **fields})["usage"] for _ in range(2)]
    for usage in usages:
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
        assert usage["cache_creation_input_tokens"] == 0
    assert usages[1]["cache_read_input_tokens"] > 0, "the same prompt was there before"


# ---- errors and keys --------------------------------------------------------------------------------------------


def assert_error(answer: Answer, status: int, kind: str) -> str:
    """Checks the form of an error, and returns its message."""
    error = answer.json
    assert (answer.status, sorted(error), sorted(error["error"])) == (
        *(status, ["error", "request_id", "type"], ["details", "message", "type"]),
    )
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    message: str = error["error"]["message"]
    return message


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def answered_by(*results: Any) -> dict[str, Any]:
    calls = [CALL, {**CALL, "id": "call_2"}]
    return {"messages": [*USER, {"role": "assistant", "content": calls}, {"role": "user", "content": list(results)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (said(), "messages[0].content"),
    (said("a"), "messages[0].content[0]"),
    (said(text("a"), IMAGE), "messages[0].content[1].type"),
    (said({"type": "document", "source": {}}), "messages[0].content[0].type"),
    (said({"type": "thinking", "thinking": "a"}), "messages[0].content[0].type"),
    (said({"type": "text"}), "messages[0].content[0].text"),
    (said(text("a", citations=[{}])), "messages[0].content[0].citations"),
    (said(text("a"), RESULT), "messages[0].content[1]"),
    (said({**RESULT, "content": [IMAGE]}), "messages[0].content[0].content[0]"),
    (said({**RESULT, "is_error": "yes"}), "messages[0].content[0].is_error"),
    (said({**RESULT, "tool_use_id": None}), "messages[0].content[0].tool_use_id"),
    (said(RESULT, role="assistant"), "messages[0].content[0].type"),
    (said({**CALL, "input": "{}"}, role="assistant"), "messages[0].content[0].input"),
    (said({**CALL, "id": ""}, role="assistant"), "messages[0].content[0].id"),
    (said({**CALL, "name": 7}, role="assistant"), "messages[0].content[0].name"),
    (said(CALL, role="assistant"), "messages"),
    (said({"type": "server_tool_use"}, role="assistant"), "messages[0].content[0].type"),
    (answered_by({**RESULT, "tool_use_id": "other"}, RESULT), "messages[2].content[0].tool_use_id"),
    (answered_by(RESULT), "messages[1].content[1]"),
    ({"system": 7}, "system"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"tools": [7]}, "tools[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**CLOCK, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**CLOCK, "name": "f" * 129}]}, "tools[0].name"),
    ({"tools": [{**CLOCK, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tools": [{**CLOCK, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
    ({"tools": [{**CLOCK, "strict": True, "input_schema": {"type": "object", "not": {}}}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"thinking": {"type": "disabled", "budget_tokens": 7}}, "thinking"),
    ({"thinking": {"type": "often"}}, "thinking.type"),
    ({"output_config": {"effort": "vast"}}, "output_config.effort"),
    ({"system": [text("a", other=1)]}, "system[0].other"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, "regex": "a"}, "regex"),
    ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stop_sequences": ["a"], "stop": ["b"]}, "stop"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": "all"}, "top_k"),
    ({"n": 2}, "n"),
    ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
    ({"container": "a"}, "container"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"speed": "fast"}, "speed"),
    ({"nonsense": 1}, "nonsense"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_what_is_wrong_is_refused_by_name(gateway: GatewayHere, change: dict[str, Any], param: str) -> None:
    answer = gateway.ask("POST", MESSAGES, {**BODY, "model": "tiny", **change})
    assert assert_error(answer, 400, "invalid_request_error").startswith(f"{param}: ")


@pytest.mark.parametrize(
    "asked",
    [
        {"cache_control": {"type": "ephemeral"}, "mcp_servers": [], "speed": "standard", "service_tier": "auto"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"tools": [{**CLOCK, "cache_control": {"type": "ephemeral"}, "defer_loading": False, "input_examples": []}]},
        {"tools": [{**CLOCK, "eager_input_streaming": True, "allowed_callers": ["direct"]}]},
        {"tools": [{**CLOCK, "name": "f" * 128}]},
        {"system": "", "stop_sequences": ["b"], "stop": ["b"]},
        {"context_management": {"edits": None}, "diagnostics": {"previous_message_id": None}, "fallbacks": []},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all", "value": None}]}},
        {"output_config": {"effort": "max"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {}, "name": None, "value": None}}},
        said(text("a", cache_control={"type": "ephemeral"}, id="lc_1")),
        {"messages": [{"role": "user", "content": "a", "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_what_changes_no_output_is_taken(edge: GatewayHere, scripted: ScriptedServer, asked: dict[str, Any]) -> None:
    versions = {"anthropic_version": "2023-06-01", "anthropic_beta": "some-beta-2025-01-01"}
    scripted.inference.script = [started(), finished()]
    assert edge.ask("POST", f"{MESSAGES}?beta=true", {**BODY, **asked}, **versions).status == 200


def test_a_message_of_too_many_results_is_refused() -> None:
    with pytest.raises(ApiError, match=r"^messages: "):
        prompt_of(messages=[{"role": "user", "content": [RESULT] * (MAX_MESSAGES + 1)}])


def test_what_is_too_much_is_refused_before_the_rest_is_read() -> None:
    for role, block, num in (("assistant", CALL, MAX_TOOL_CALLS), ("user", RESULT, MAX_MESSAGES)):
        with pytest.raises(ApiError, match=f": more than {num}"):
            prompt_of(messages=[{"role": role, "content": [block] * (num + 1) + ["no block"]}])


def test_a_conversation_that_is_too_long_is_told_in_anthropics_words(gateway: GatewayHere) -> None:
    long = {**BODY, "model": "tiny", "messages": [{"role": "user", "content": "b" * 3000}]}
    message = assert_error(gateway.ask("POST", MESSAGES, {**long, "max_tokens": 2000}), 400, "invalid_request_error")
    num_tokens = gateway.ask("POST", COUNT, {**long, "max_tokens": None}).json["input_tokens"]
    assert message == f"input length and `max_tokens` exceed context limit: {num_tokens} + 2000 > 4096"
    long["messages"] = [{"role": "user", "content": "b" * 5000}]
    message = assert_error(gateway.ask("POST", MESSAGES, long), 400, "invalid_request_error")
    num_tokens = gateway.ask("POST", COUNT, {**long, "max_tokens": None}).json["input_tokens"]
    assert message == f"prompt is too long: {num_tokens} tokens > 4096 maximum"
    long["messages"] = [{"role": "user", "content": "b" * 20_000}]
    counted = gateway.ask("POST", COUNT, {**long, "max_tokens": None})
    assert assert_error(counted, 400, "invalid_request_error").startswith("prompt is too long: more than 16384 tokens")


def test_a_prompt_that_prefill_finds_too_long_is_told_in_anthropics_words(
    edge: GatewayHere, scripted: ScriptedServer
) -> None:
    refused = failure(code_pb2.INVALID_ARGUMENT, "prompt: too much", reason="CONTEXT_EXCEEDED", field="prompt")
    scripted.inference.script = [refused]
    message = assert_error(edge.ask("POST", MESSAGES, BODY), 400, "invalid_request_error")
    assert message == "prompt is too long: too much"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_errors_have_anthropics_form(loop: LoopThread, scripted: ScriptedServer, tmp_path: Path, path: str) -> None:
    settings = {"api_key_file": key_file(tmp_path, "first-key", "second-key"), "max_request_bytes": 65536}
    with gateway_here(loop, scripted.address, **settings) as here:
        body = {**BODY, "max_tokens": 8 if path == MESSAGES else None}
        for shown in ({}, {"x_api_key": "other"}, {"x_api_key": "first-key", "authorization": "Bearer second-key"}):
            assert_error(here.ask("POST", path, body, **shown), 401, "authentication_error")
        key = {"x_api_key": "first-key"}
        assert_error(here.ask("GET", path, **key), 405, "invalid_request_error")
        assert_error(here.ask("POST", path, body, content_type="text/plain", **key), 415, "invalid_request_error")
        assert_error(here.ask("POST", path, b"{", **key), 400, "invalid_request_error")
        assert_error(here.ask("POST", path, {"a": "b" * 70000}, **key), 413, "request_too_large")
        assert_error(here.ask("POST", path, {**body, "model": "other"}, **key), 404, "not_found_error")


def test_a_key_comes_in_either_header_or_both_here_and_in_one_elsewhere(
    loop: LoopThread, scripted: ScriptedServer, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, "first-key", "second-key")
    scripted.inference.script = [started(), finished()]
    with gateway_here(loop, scripted.address, api_key_file=keys) as here:
        bare, bearer = {"x_api_key": "first-key"}, {"authorization": "Bearer first-key"}
        for shown in (bare, bearer, {**bare, **bearer}):
            assert here.ask("POST", MESSAGES, BODY, **shown).status == 200
        assert here.ask("GET", "/v1/models", **bare).status == 401


@pytest.mark.parametrize(
    ("status", "expected", "kind"),
    [
        (failure(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL"), 429, "rate_limit_error"),
        (failure(code_pb2.UNAVAILABLE, "no", reason="NO_PREFILL"), 503, "overloaded_error"),
        (failure(code_pb2.DEADLINE_EXCEEDED, "late"), 504, "timeout_error"),
        (failure(code_pb2.INTERNAL, "broke"), 500, "api_error"),
    ],
    ids=["full", "unavailable", "late", "broken"],
)
def test_a_failure_of_the_decode_service_has_its_type(
    loop: LoopThread, scripted: ScriptedServer, status: Any, expected: int, kind: str
) -> None:
    scripted.inference.script = [status]
    admission_timeout_s = 1.0 if status.code == code_pb2.UNAVAILABLE else BOUND_S  # it tries for as long
    with gateway_here(loop, scripted.address, admission_timeout_s=admission_timeout_s) as here:
        assert_error(here.ask("POST", MESSAGES, {**BODY, "stream": True}), expected, kind)


def test_a_thread_is_refused_in_the_form_from_which_the_package_recovers(edge: GatewayHere) -> None:
    for path, more in ((MESSAGES, {"max_tokens": 9}), (f"{MESSAGES}/count_tokens", {})):
        body = {"model": "demo", "messages": BODY["messages"], "thread": {"type": "create"}, **more}
        answer = edge.ask("POST", path, body)
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert (answer.status, answer.json["error"]["details"]) == (400, details)


def test_an_unknown_path_of_the_api_is_told_in_its_form(edge: GatewayHere) -> None:
    for path in (f"{MESSAGES}/batches", f"{MESSAGES}/count_tokens/x"):
        answer = edge.ask("POST", path, BODY)
        assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (404, "error", "not_found_error")
    assert "type" not in edge.ask("POST", "/v1/messages_too", BODY).json


@pytest.mark.parametrize("content", ["", [], [text("")], " \n", [text(" "), text("\n")]])
def test_an_answer_that_says_nothing_yet_is_a_new_one(
    edge: GatewayHere, scripted: ScriptedServer, content: Any
) -> None:
    scripted.inference.script = [started(), finished()]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    assert edge.ask("POST", MESSAGES, {**BODY, "messages": messages}).status == 200
    chat = scripted.inference.requests.get(timeout=BOUND_S).chat
    assert ([each.role for each in chat.messages], chat.continue_final_message) == (["user"], False)


def test_an_answer_that_says_nothing_is_no_conversation() -> None:
    with pytest.raises(ApiError, match=r"^messages: there is nothing to answer"):
        prompt_of(messages=[{"role": "assistant", "content": ""}])


@pytest.mark.parametrize("content", ["", [], BILLED])
def test_a_conversation_of_nothing_is_refused(content: Any) -> None:
    with pytest.raises(ApiError, match=r"^messages: there is nothing to answer"):
        prompt_of(messages=[{"role": "system", "content": content}])


def test_a_stream_that_fails_ends_with_an_error_event(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), delta([5], "a"), failure(code_pb2.INTERNAL, "broke")]
    *events, last = events_of(edge.ask("POST", MESSAGES, {**BODY, "stream": True}, x_request_id="r"))
    assert [event["type"] for event in events] == ["message_start", "content_block_start", "content_block_delta"]
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "broke", "details": None},
        "request_id": "r",
    }
    wait_until(lambda: edge.metric("baton_gateway_requests_total", route=MESSAGES, status="500") == 1)
