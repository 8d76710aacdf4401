"""The /v1/responses endpoint, called by the `openai` package where that can send what is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import openai
import pydantic
import pytest
from google.rpc import code_pb2
from openai.types.responses import FunctionTool, Response, ResponseStreamEvent, ToolChoiceFunction

from baton import ChatMessage, Client, ToolCall, ToolChoice
from baton.v1 import types_pb2
from baton.v1.inference_pb2 import FINISH_REASON_EOS
from gateway.apis.responses import RESPONSES, parse_response
from gateway.errors import ApiError
from gateway.plan import ChatInput
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started
from tests.gateway.answers import answered
from tests.gateway.gateway_here import Answer, GatewayHere
from tests.gateway.parsing.transcripts import TRANSCRIPTS, Transcript
from tests.support.running_pair import wait_until

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "demo", "input": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["ab", "cd"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
PICK: dict[str, Any] = {"type": "function", "name": "pick", "description": "Picks one.", "parameters": SCHEMA}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock"}
LOGPROBS = ["message.output_text.logprobs"]
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "pick", "arguments": "{}"}
DONE: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "blue"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
SAID: dict[str, Any] = {"role": "assistant", "content": "Well."}
TEXT: dict[str, Any] = {"type": "input_text", "text": "hi"}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
PIECES = (
    "<think>",
    "Hm.",
    "</think>",
    "\n\nIt is",
    " so.",
    '\n<tool_call>\n{"name": "pick", "arguments": {"kind"',
    ': "ab"}}\n</tool_call>',
)


class Kind(pydantic.BaseModel):
    kind: Literal["ab", "cd"]


@pytest.fixture
def speaks(scripted: ScriptedServer) -> ScriptedServer:
    """The decode service, whose model reasons, answers, and calls a function."""
    ending = finished(FINISH_REASON_EOS, num_completion_tokens=7, num_cached_tokens=2)
    ending.finished.usage.num_reasoning_tokens = 3
    scripted.inference.script = [started(), *(delta([place], text) for place, text in enumerate(PIECES)), ending]
    return scripted


def events_of(edge: GatewayHere, **fields: Any) -> list[ResponseStreamEvent]:
    return list(edge.openai().responses.create(**{**BODY, **fields}, stream=True))


def without_ids(response: Any) -> dict[str, Any]:
    """A response as JSON, without what differs between two equal ones."""
    told = response.to_dict(warnings=False)
    assert told.pop("id") and told.pop("created_at")
    for item in told["output"]:
        assert item.pop("id")
        assert item.pop("call_id", "some")
    return dict(told)


def ask(edge: GatewayHere, **fields: Any) -> Answer:
    return edge.ask("POST", PATH, {**BODY, **fields})


def prompt_of(**fields: Any) -> ChatInput:
    (prompt,) = parse_response(json.dumps({**BODY, **fields}).encode()).prompts
    assert isinstance(prompt, ChatInput)
    return prompt


# ---- the answer ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("speaks")
def test_an_output_is_a_list_of_items(edge: GatewayHere) -> None:
    longest = {"a" * 64: "b" * 512}
    response = edge.openai().responses.create(**BODY, tools=[PICK], metadata=longest, instructions="Be brief.")
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["Hm."]
    assert message.type == "message" and response.output_text == "It is so."
    assert call.type == "function_call" and (call.name, call.arguments) == ("pick", '{"kind": "ab"}')
    assert {item.status for item in (reasoning, message, call)} == {response.status} == {"completed"}
    assert response.error is response.incomplete_details is None
    assert response.usage is not None
    assert response.usage.to_dict() == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {
            "reasoning_tokens": 3,
            "draft_tokens": 0,
            "accepted_draft_tokens": 0,
            "forced_draft_tokens": 0,
        },
        "total_tokens": 10,
    }
    assert (response.metadata, response.instructions, response.tool_choice) == (longest, "Be brief.", "auto")
    assert (response.model_extra or {})["store"] is False


@pytest.mark.usefixtures("speaks")
@pytest.mark.parametrize("left_out", [{}, {"type": None}], ids=["absent", "null"])
def test_tools_come_back_as_openais_types_have_them(left_out: dict[str, Any], edge: GatewayHere) -> None:
    answer = ask(edge, tools=[{"name": "pick", **left_out}], tool_choice={"name": "pick", **left_out}).json
    response = Response.model_validate(answer)
    assert isinstance(response.tools[0], FunctionTool) and isinstance(response.tool_choice, ToolChoiceFunction)


@pytest.mark.usefixtures("speaks")
def test_a_stream_has_the_same_items_in_events(edge: GatewayHere) -> None:
    whole = edge.openai().responses.create(**BODY, tools=[PICK])
    events = events_of(edge, tools=[PICK])
    text, arguments = "response.output_text", "response.function_call_arguments"
    begun, ended = ("response.output_item.added", "response.content_part.added"), "response.output_item.done"
    part_ended = "response.content_part.done"
    reasoning = "response.reasoning_text"
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress"),
        *(*begun, f"{reasoning}.delta", f"{reasoning}.done", part_ended, ended),
        *(*begun, f"{text}.delta", f"{text}.delta", f"{text}.done", part_ended, ended),
        *(begun[0], f"{arguments}.delta", f"{arguments}.delta", f"{arguments}.done", ended),
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed" and without_ids(last.response) == without_ids(whole)
    assert [event.item for event in events if event.type == ended] == last.response.output
    for index, item in enumerate(last.response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        added, deltas = own[0], "".join(event.delta for event in own if event.type.endswith(".delta"))  # type: ignore[union-attr]
        assert added.type == begun[0] and added.item.status == "in_progress"  # type: ignore[union-attr]
        written = item.arguments if item.type == "function_call" else item.content[0].text  # type: ignore[union-attr,index]
        assert deltas == written
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}


@pytest.mark.usefixtures("speaks")
def test_each_event_is_named_as_its_type(edge: GatewayHere) -> None:
    *events, rest = ask(edge, stream=True).body.decode().split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


@pytest.mark.usefixtures("speaks")
def test_the_packages_own_stream_comes_to_the_same_response(edge: GatewayHere) -> None:
    whole = edge.openai().responses.create(**BODY, tools=[PICK])
    with edge.openai().responses.stream(**BODY, tools=[PICK]) as stream:
        accumulated = {event.type: event.snapshot for event in stream if hasattr(event, "snapshot")}
        final = stream.get_final_response()
    assert accumulated == {
        "response.output_text.delta": whole.output_text,
        "response.function_call_arguments.delta": whole.output[-1].arguments,  # type: ignore[union-attr]
    }
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]


async def test_a_cut_output_is_incomplete(gateway: GatewayHere, pair: Client) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "the other thing", "max_output_tokens": 6, "temperature": 0}
    async with gateway.openai_async() as client:
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert (whole.incomplete_details.reason, whole.output[-1].status) == ("max_output_tokens", "incomplete")  # type: ignore[union-attr]
    last = events[-1]
    assert last.type == "response.incomplete"
    ours, theirs = without_ids(last.response), without_ids(whole)
    assert ours.pop("usage")["output_tokens"] == theirs.pop("usage")["output_tokens"] == 6
    assert ours == theirs
    user = [ChatMessage("user", "the other thing")]
    assert whole.output_text == pair.complete(chat=user, temperature=0.0, max_tokens=6).text


def test_an_empty_output_is_an_empty_message(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), finished(FINISH_REASON_EOS)]
    (message,) = edge.openai().responses.create(**BODY).output
    assert message.type == "message" and [part.text for part in message.content] == [""]  # type: ignore[union-attr]


TOKENS = (
    *(
        "<think>",
        "Hm",
        ".",
        "</think>",
        "\n\n",
        "<",
        "b",
        ">:",
        "\n",
        "<tool_call>",
        "\n",
        '{"',
        "name",
        '": "',
        "pick",
    ),
    *('", "', "arguments", '": ', '{"kind": ', '"ab"}', "}", "\n", "</tool_call>", "\n", "Well", ".", "\n"),
)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (PIECES, [PIECES[3:5]]),
        (["".join(PIECES)], [["".join(PIECES)]]),
        (TOKENS, [["<", "b", ">:"], ["Well", ".", "\n"]]),
        (["<tool_call>", '{"name": "pick"', "}</tool_call>Well."], [["}</tool_call>Well."]]),
        (["<think", ">Hm.</think>Well."], [[">Hm.</think>Well."]]),
    ],
    ids=["in pieces", "at once", "token by token", "the end of a call with words", "all thoughts with words"],
)
def test_log_probabilities_come_with_the_text_of_messages(
    edge: GatewayHere, scripted: ScriptedServer, pieces: Sequence[str], expected: Sequence[Sequence[str]]
) -> None:
    def position(token_id: int, text: str) -> types_pb2.PositionLogprobs:
        token = types_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, token=text.encode())
        return types_pb2.PositionLogprobs(chosen=token, top=[token])

    deltas = [delta([place], text, [position(place, text)]) for place, text in enumerate(pieces)]
    scripted.inference.script = [started(), *deltas, finished(FINISH_REASON_EOS)]
    asked: dict[str, Any] = {"tools": [PICK], "include": LOGPROBS, "top_logprobs": 1}
    whole = edge.openai().responses.create(**BODY, **asked)
    events = events_of(edge, **asked)
    said = [item.content[0].logprobs for item in whole.output if item.type == "message"]  # type: ignore[union-attr]
    assert [[each.token for each in part or ()] for part in said] == [list(tokens) for tokens in expected]
    assert {top.logprob for part in said for each in part or () for top in each.top_logprobs} == {-0.5}
    streamed = [each.token for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert streamed == [token for tokens in expected for token in tokens]
    last = events[-1]
    assert last.type == "response.completed" and without_ids(last.response) == without_ids(whole)
    sampling = scripted.inference.requests.get(timeout=BOUND_S).sampling
    assert (sampling.HasField("logprobs"), sampling.logprobs) == (True, 1)


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda each: each.name)
def test_the_items_of_an_output_are_one_message_when_they_are_fed_back(transcript: Transcript) -> None:
    response, _ = answered(RESPONSES, transcript.pieces, form=transcript.form, is_open=transcript.is_open)
    output = response["output"]
    ids = [item["call_id"] for item in output if item["type"] == "function_call"]
    told = [{"type": "function_call_output", "call_id": call_id, "output": "7"} for call_id in ids]
    user, own, *results = prompt_of(input=[USER, *output, *told]).messages
    said = transcript.said
    calls = tuple(ToolCall(*call, call_id) for call, call_id in zip(said.calls, ids, strict=True))
    assert (user.role, own) == ("user", ChatMessage("assistant", said.content, calls, reasoning=said.reasoning))
    assert [(result.role, result.tool_call_id) for result in results] == [("tool", call_id) for call_id in ids]


# ---- tools and formats, in front of a real pair ---------------------------------------------------------------------


def test_a_call_that_must_come_and_its_answer(gateway: GatewayHere) -> None:
    client = gateway.openai()
    asked: dict[str, Any] = {"model": "tiny", "tools": [PICK, CLOCK], "max_output_tokens": 100, "temperature": 0}
    first = client.responses.create(**asked, input="the other thing", tool_choice={"type": "function", "name": "pick"})
    (call,) = first.output
    assert call.type == "function_call" and call.name == "pick" and json.loads(call.arguments)["kind"] in ("ab", "cd")
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
    history: list[Any] = [{"role": "user", "content": "the other thing"}, *first.output, told]
    second = client.responses.create(**{**asked, "max_output_tokens": 8}, input=history, tool_choice="none")
    assert second.output_text


def test_an_answer_is_parsed(gateway: GatewayHere) -> None:
    client = gateway.openai()
    asked: dict[str, Any] = {"model": "tiny", "input": "the other thing", "max_output_tokens": 120, "temperature": 0}
    parsed = client.responses.parse(**asked, text_format=Kind)
    assert isinstance(parsed.output_parsed, Kind)
    with client.responses.stream(**asked, text_format=Kind) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


# ---- what reaches the decode service --------------------------------------------------------------------------------


def test_an_output_can_be_fed_back(edge: GatewayHere, speaks: ScriptedServer) -> None:
    client = edge.openai()
    first = client.responses.create(**BODY, tools=[PICK])
    call_id = first.output[-1].call_id  # type: ignore[union-attr]
    told = {"type": "function_call_output", "call_id": call_id, "output": [{"type": "input_text", "text": "blue"}]}
    history: list[Any] = [USER, *(item.to_dict() for item in first.output), told]
    client.responses.create(**{**BODY, "input": history}, tools=[PICK])
    speaks.inference.requests.get(timeout=BOUND_S)
    user, assistant, tool = speaks.inference.requests.get(timeout=BOUND_S).chat.messages
    assert (user.role, user.content, assistant.role, tool.role) == ("user", "hi", "assistant", "tool")
    assert (assistant.reasoning, assistant.content) == ("Hm.", "It is so.")
    (call,) = assistant.tool_calls
    assert (call.name, call.arguments, call.id) == ("pick", '{"kind": "ab"}', call_id)
    assert (tool.content, tool.tool_call_id) == ("blue", call_id)


PICKED = ToolCall("pick", "{}", "c1")


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [ChatMessage("user", "hi")]),
        (
            [{"role": "developer", "content": "Be brief."}, {"type": "message", **USER}],
            [ChatMessage("system", "Be brief."), ChatMessage("user", "hi")],
        ),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [ChatMessage("user", "a\nb")],
        ),
        ([SAID, CALL, SAID, SAID], [ChatMessage("assistant", "Well.\nWell.\nWell.", (PICKED,))]),
        ([USER, USER], [ChatMessage("user", "hi\nhi")]),
        (
            [{**THOUGHT, "content": [{"type": "reasoning_text", "text": "Hm."}]}, SAID, CALL, DONE],
            [
                ChatMessage("assistant", "Well.", (PICKED,), reasoning="Hm."),
                ChatMessage("tool", "blue", tool_call_id="c1"),
            ],
        ),
        (
            [{**THOUGHT, "summary": [{"type": "summary_text", "text": "Hm."}]}, CALL, SAID, USER],
            [ChatMessage("assistant", "Well.", (PICKED,), reasoning="Hm."), ChatMessage("user", "hi")],
        ),
        (
            [SAID, {**THOUGHT, "content": [{"type": "reasoning_text", "text": "Hm."}]}, SAID],
            [ChatMessage("assistant", "Well.\nWell.", reasoning="Hm.")],
        ),
    ],
)
def test_items_become_messages(items: Any, messages: Sequence[ChatMessage]) -> None:
    assert prompt_of(input=items).messages == tuple(messages)


@pytest.mark.parametrize(
    ("items", "words"),
    [("hi", "First."), ([{"role": "developer", "content": "Be brief."}, USER], "First.\nBe brief.")],
    ids=["alone", "before a developer's"],
)
def test_instructions_are_the_beginning_of_a_system_message(items: Any, words: str) -> None:
    chat = prompt_of(input=items, instructions="First.").messages
    assert chat == (ChatMessage("system", words), ChatMessage("user", "hi"))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice()),
        ("required", ToolChoice(required=True)),
        ({"type": "function", "name": "pick"}, ToolChoice(required=True, names=("pick",), parallel=False)),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "pick"}]},
            ToolChoice(required=True, names=("pick",)),
        ),
    ],
)
def test_a_choice_of_tools(choice: Any, expected: ToolChoice) -> None:
    assert prompt_of(tools=[PICK, CLOCK], tool_choice=choice).arguments["tool_choice"] == expected
    assert prompt_of(tools=[PICK, CLOCK], tool_choice="none").tools is None


def test_options_travel(edge: GatewayHere, speaks: ScriptedServer) -> None:
    form = {"type": "json_schema", "name": "kind", "schema": SCHEMA, "strict": True}
    asked: dict[str, Any] = {
        "max_output_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
        "text": {"format": form},
        "reasoning": {"effort": "low", "summary": "auto"},
        "cache_salt": "tenant",
        "priority": 7,
        "truncate_prompt_tokens": 50,
        "thinking_token_budget": 4,
    }
    response = ask(edge, **asked).json
    assert response["text"]["format"] == {**form, "description": None}
    assert (response["reasoning"], response["temperature"]) == ({"effort": "low", "summary": None}, 0.5)
    request = speaks.inference.requests.get(timeout=BOUND_S)
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.seed) == (9, 0.5, 3)
    assert json.loads(request.sampling.json_schema) == SCHEMA
    assert json.loads(request.chat.chat_template_kwargs) == {"reasoning_effort": "low"}
    assert (request.cache_salt, request.priority, request.truncate_prompt_tokens) == ("tenant", 7, 50)
    assert request.sampling.reasoning.max_tokens == 4


# ---- refusals and failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"include": [*LOGPROBS, "file_search_call.results"]}, "include[1]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"text": {"verbosity": "lower"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"max_tokens": 2}, "thinking_token_budget": 3}, "reasoning.max_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**PICK, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**PICK, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [PICK, PICK]}, "tools[1].name"),
        ({"tools": [PICK], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [PICK], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tools": [PICK], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{**USER, "name": "Ann"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{**TEXT, "other": 1}]}]}, "input[0].content[0].other"),
        ({"input": [USER, {**CALL, "call_id": None}]}, "input[1].call_id"),
        ({"input": [{**DONE, "output": [{"type": "input_file"}]}]}, "input[0].output[0]"),
        ({"input": [{**THOUGHT, "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_response(json.dumps({**BODY, **fields}).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "background": False, "truncation": "disabled", "user": "u", "service_tier": "auto"},
        {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "stream_options": {}},
        {"client_metadata": {"a": "b"}, "metadata": {}},
        {"reasoning": {"effort": "max", "context": "auto", "mode": "standard"}},
        {"tools": [{**PICK, "defer_loading": False, "async": False, "allowed_callers": ["direct"]}]},
        {"background_options": {}, "image": {}, "input": [USER, {**CALL, "async": False}, DONE]},
        {"text": {"verbosity": "medium", "format": {"type": "text"}}, "reasoning": {}, "tools": [], "metadata": None},
        {"input": [{"role": "user", "content": [{**TEXT, "annotations": [{"type": "a"}], "logprobs": [{}]}]}]},
        {"input": [{"role": "user", "content": [{**TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}]}]},
        {"input": [USER, *({**each, "caller": {"type": "direct"}} for each in (CALL, {**DONE, "name": "pick"}))]},
        {"input": [{"role": "user", "content": [{**TEXT, "parsed": {}}]}, {**CALL, "parsed_arguments": {}}, DONE]},
        {"input": [{**SAID, "type": "message", "id": "msg_1", "status": "completed", "phase": "final_answer"}]},
        {"input": [{**each, "cache_control": {"type": "ephemeral"}, "metadata": {}} for each in (USER, CALL, DONE)]},
        {"cache_control": {"type": "ephemeral"}},
        {"text": {"format": {"type": "text", "schema": None, "value": None}}},
    ],
)
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert parse_response(json.dumps({**BODY, **fields}).encode()).sampling.get("json_schema") is None


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": PICK["parameters"]},
        {"type": "json_schema", "value": PICK["parameters"]},
        {"type": "json_schema", "schema": None, "value": PICK["parameters"]},
    ],
)
def test_a_schema_of_an_answer_has_the_names_of_other_servers(form: dict[str, Any]) -> None:
    plan = parse_response(json.dumps({**BODY, "text": {"format": form}}).encode())
    assert json.loads(plan.sampling["json_schema"]) == PICK["parameters"]


def test_the_package_raises_what_the_decode_service_refuses(edge: GatewayHere, scripted: ScriptedServer) -> None:
    for field, param in (
        ("chat.messages[3].tool_call_id", "input"),
        ("sampling.max_tokens", "max_output_tokens"),
        ("chat.tools[0].parameters", "tools[0].parameters"),
        ("chat.chat_template_kwargs", "reasoning.effort"),
        ("prompt", "input"),
    ):
        scripted.inference.script = [failure(code_pb2.INVALID_ARGUMENT, f"{field}: is odd", reason="X", field=field)]
        with pytest.raises(openai.BadRequestError, match=f"{param.split('[')[0]}.*: is odd") as caught:
            edge.openai().responses.create(**BODY, reasoning={"effort": "low"})
        assert caught.value.param == param


def test_an_output_of_no_call_is_named_by_its_place_in_the_input(gateway: GatewayHere) -> None:
    calls = [CALL, DONE]
    for items, place in (([SAID, DONE], 1), ([SAID, *calls, DONE], 3), ([SAID, *calls, SAID, DONE], 4)):
        error = gateway.ask("POST", PATH, {"model": "tiny", "instructions": "be kind", "input": items}).error
        assert error["param"] == f"input[{place}].call_id"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("chat.messages[0]", "instructions"),
        ("chat.messages[1]", "input[0]"),
        ("chat.messages[2].reasoning", "input[1]"),
        ("chat.messages[2].tool_calls[0].id", "input[2].call_id"),
        ("chat.messages[2].tool_calls[0]", "input[2]"),
        ("chat.messages[3]", "input[4]"),
    ],
)
def test_an_error_about_a_message_names_the_item(
    edge: GatewayHere, scripted: ScriptedServer, field: str, param: str
) -> None:
    scripted.inference.script = [failure(code_pb2.INVALID_ARGUMENT, f"{field}: is odd", reason="X", field=field)]
    error = ask(edge, instructions="Be brief.", input=[USER, SAID, CALL, SAID, DONE]).error
    assert (error["param"], error["message"]) == (param, f"{param}: is odd")


@pytest.mark.parametrize(
    ("why", "status", "code"),
    [(code_pb2.INTERNAL, 500, "server_error"), (code_pb2.INVALID_ARGUMENT, 400, "invalid_prompt")],
)
def test_a_stream_that_fails_ends_with_a_failed_response(
    edge: GatewayHere, scripted: ScriptedServer, why: int, status: int, code: str
) -> None:
    scripted.inference.script = [started(), delta([5], "a"), failure(why, "broke")]
    *_, last = events_of(edge)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == (code, "broke")
    (message,) = last.response.output
    assert (message.status, message.content[0].text) == ("incomplete", "a")  # type: ignore[union-attr]
    wait_until(lambda: edge.metric("baton_gateway_requests_total", route=PATH, status=str(status)) == 1)
