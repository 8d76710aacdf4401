"""Tests that chat answers have reasoning, content and function calls in OpenAI's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from baton.client.event_order import CompletionBuilder
from baton.codec import event_from_wire
from baton.events import Completion, Event, Started
from baton.v1.inference_pb2 import FINISH_REASON_EOS, FINISH_REASON_LENGTH, FinishReason
from baton.v1.types_pb2 import Reasoning
from common.text.output_formats import HERMES, MISTRAL, OutputFormat
from gateway.apis.chat import ChatChoice, parse_chat
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import GatewayHere
from tests.gateway.parsing.transcripts import FUNCTIONS, TRANSCRIPTS, Transcript

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in FUNCTIONS.items()]
CALLS = (
    'Both.\n<tool_call>\n{"name": "look_up", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


def events_of(
    pieces: Sequence[str], reason: FinishReason.ValueType = FINISH_REASON_EOS, *, is_open: bool = False
) -> list[Event]:
    first = started()
    first.started.is_reasoning_open = is_open
    deltas = [delta([place], piece) for place, piece in enumerate(pieces)]
    return [event_from_wire(each) for each in (first, *deltas, finished(reason))]


def choice_of(events: Sequence[Event], form: OutputFormat = HERMES, **fields: Any) -> ChatChoice:
    plan = parse_chat(json.dumps({**CHAT, "tools": TOOLS, **fields}).encode())
    assert isinstance(events[0], Started)
    return ChatChoice(0, plan, form, events[0])


def whole(events: Sequence[Event], form: OutputFormat = HERMES) -> dict[str, Any]:
    builder = CompletionBuilder()
    completion: Completion | None = None
    for event in events:
        completion = builder.add(event)
    assert completion is not None
    return choice_of(events, form).whole(completion)


def chunks(events: Sequence[Event], form: OutputFormat = HERMES, **fields: Any) -> list[dict[str, Any]]:
    choice = choice_of(events, form, **fields)
    _, *deltas, last = events
    parts = [choice.opening(), *(choice.part(each) for each in deltas), choice.ending(last)]  # type: ignore[arg-type]
    return [each for each in parts if each is not None]


def joined(deltas: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a client puts together from a stream's deltas."""
    message: dict[str, Any] = {}
    for each in deltas:
        for name in ("content", "reasoning_content"):
            if each.get(name):
                message[name] = message.get(name, "") + each[name]
        for call in each.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert call["index"] == len(calls) - 1
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


def test_a_message_has_the_calls() -> None:
    choice = whole(events_of([CALLS]))
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message["role"]) == ("tool_calls", "Both.", "assistant")
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "look_up", "arguments": '{"city": "Rome"}'}
    assert second["function"] == {"name": "stop", "arguments": "{}"}
    assert {each["type"] for each in (first, second)} == {"function"}
    assert all(len(each["id"]) == 9 and each["id"].isalnum() for each in (first, second)), "as Mistral's template asks"
    assert first["id"] != second["id"]


def test_a_message_of_calls_alone_has_no_content() -> None:
    assert whole(events_of([CALLS.removeprefix("Both.\n")]))["message"]["content"] is None


def test_a_message_without_calls_has_none() -> None:
    choice = whole(events_of(["Hello."]))
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_calls_that_the_length_cut_off_end_for_that_reason() -> None:
    events = events_of([CALLS[:-20]], FINISH_REASON_LENGTH)
    assert whole(events)["finish_reason"] == chunks(events)[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda each: each.name)
def test_a_stream_adds_up_to_the_message(transcript: Transcript) -> None:
    events = events_of(transcript.pieces, is_open=transcript.is_open)
    answer = whole(events, transcript.form)
    parts = chunks(events, transcript.form)
    message = joined(part["delta"] for part in parts)
    expected = {name: value for name, value in answer["message"].items() if name not in ("role", "refusal") and value}
    assert without_ids(message) == without_ids(expected)
    assert [part["finish_reason"] for part in parts] == [*[None] * (len(parts) - 1), answer["finish_reason"]]
    said = transcript.said
    assert answer["message"].get("reasoning_content", "") == said.reasoning
    assert [tuple(call["function"].values()) for call in message.get("tool_calls", ())] == list(said.calls)


def test_a_streamed_call_begins_with_its_name_and_goes_on_with_arguments() -> None:
    pieces = ["<tool_call>", '{"name": "look_up",', ' "arguments": {"ci', 'ty": "Rome"}', "}</tool_call>"]
    opening, begun, more, last = chunks(events_of(pieces))
    assert opening["delta"] == {"role": "assistant", "content": ""}
    (call,) = begun["delta"]["tool_calls"]
    assert call == {
        "index": 0,
        "id": call["id"],
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"ci'},
    }
    assert more["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Rome"}'}}]}
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


def test_text_that_was_held_back_comes_with_the_end() -> None:
    *_, last = chunks(events_of(["a", " <tool_"]))
    assert (last["delta"], last["finish_reason"]) == ({"content": " <tool_"}, "stop")


def test_a_stream_has_all_token_ids_of_held_text() -> None:
    parts = chunks(events_of(["<tool_call>", '{"name": ', '"stop"}']), return_token_ids=True)
    assert [part["token_ids"] for part in parts[1:-1]] == [[0], [1], [2]]
    assert [part["delta"] for part in parts[1:3]] == [{"content": ""}] * 2


# ---- over HTTP --------------------------------------------------------------------------------------------------


@pytest.fixture
def reasons(scripted: ScriptedServer) -> ScriptedServer:
    """The decode service. Its model writes in the Hermes format and reasons."""
    scripted.inference.output_format = "hermes"
    scripted.inference.script = [
        *(started(), delta([1], "<think>"), delta([2], "Hm."), delta([3], "</think>"), delta([4], "\n\nYes.")),
        finished(FINISH_REASON_EOS, num_completion_tokens=4),
    ]
    return scripted


def deltas_of(edge: GatewayHere, **fields: Any) -> list[dict[str, Any]]:
    answer = edge.ask("POST", "/v1/chat/completions", {**CHAT, "stream": True, **fields})
    return [chunk["choices"][0]["delta"] for chunk in answer.chunks]


@pytest.mark.usefixtures("reasons")
def test_reasoning_is_apart_from_the_content(edge: GatewayHere) -> None:
    message = edge.ask("POST", "/v1/chat/completions", CHAT).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert joined(iter(deltas_of(edge))) == {"reasoning_content": "Hm.", "content": "Yes."}


def test_a_model_that_does_not_reason_has_words_only(edge: GatewayHere, reasons: ScriptedServer) -> None:
    reasons.inference.has_reasoning = False
    message = edge.ask("POST", "/v1/chat/completions", CHAT).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>Hm.</think>\n\nYes.", "refusal": None}
    assert not reasons.inference.requests.get(timeout=BOUND_S).sampling.HasField("reasoning")


def test_a_budget_of_reasoning_is_refused_where_the_model_writes_none(
    edge: GatewayHere, reasons: ScriptedServer
) -> None:
    reasons.inference.has_reasoning = False
    refused = edge.ask("POST", "/v1/chat/completions", {**CHAT, "thinking_token_budget": 9})
    assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")
    for none in ({"thinking_token_budget": 0}, {"reasoning_effort": "none"}):
        assert edge.ask("POST", "/v1/chat/completions", {**CHAT, **none}).status == 200


def test_the_decode_service_is_told_the_markers_and_the_limit_of_reasoning(
    edge: GatewayHere, reasons: ScriptedServer
) -> None:
    edge.ask("POST", "/v1/chat/completions", {**CHAT, "thinking_token_budget": 9})
    edge.ask("POST", "/v1/chat/completions", {**CHAT, "reasoning_effort": "none"})
    edge.ask("POST", "/v1/chat/completions", CHAT)
    edge.ask("POST", "/v1/completions", {"model": "demo", "prompt": "hi"})
    bounded, none, free, plain = (reasons.inference.requests.get(timeout=BOUND_S).sampling for _ in range(4))
    assert bounded.reasoning == Reasoning(start="<think>", end="</think>", max_tokens=9)
    assert none.reasoning == Reasoning(start="<think>", end="</think>", max_tokens=0)
    assert free.reasoning == Reasoning(start="<think>", end="</think>")
    assert not plain.HasField("reasoning")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"a": 1}}, {"reasoning_effort": "high", "a": 1}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"a": 1}}, {"a": 1}),
    ],
)
def test_the_chat_template_is_told_the_effort(
    fields: dict[str, Any], variables: dict[str, Any], edge: GatewayHere, reasons: ScriptedServer
) -> None:
    edge.ask("POST", "/v1/chat/completions", {**CHAT, **fields})
    assert json.loads(reasons.inference.requests.get(timeout=BOUND_S).chat.chat_template_kwargs) == variables


def test_the_usage_counts_the_tokens_of_reasoning(edge: GatewayHere, reasons: ScriptedServer) -> None:
    ending = finished(FINISH_REASON_EOS, num_completion_tokens=4)
    ending.finished.usage.num_reasoning_tokens = 3
    reasons.inference.script = [started(), delta([1, 2, 3, 4], "<think>Hm.</think>Yes."), ending]
    usage = edge.ask("POST", "/v1/chat/completions", {**CHAT, "n": 2}).json["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (
        8,
        {"reasoning_tokens": 6, "draft_tokens": 0, "accepted_draft_tokens": 0, "forced_draft_tokens": 0},
    )


@pytest.mark.usefixtures("reasons")
def test_reasoning_may_be_left_out_of_the_answer(edge: GatewayHere) -> None:
    body = {**CHAT, "include_reasoning": False}
    message = edge.ask("POST", "/v1/chat/completions", body).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert joined(iter(deltas_of(edge, include_reasoning=False))) == {"content": "Yes."}


def test_reasoning_that_the_prompt_opened_is_known(edge: GatewayHere, reasons: ScriptedServer) -> None:
    first = started()
    first.started.is_reasoning_open = True
    reasons.inference.script = [first, delta([1], "Hm.</think>Yes."), finished(FINISH_REASON_EOS)]
    assert joined(iter(deltas_of(edge))) == {"reasoning_content": "Hm.", "content": "Yes."}


def test_the_text_of_chats_has_the_markers_that_are_special_tokens(edge: GatewayHere, reasons: ScriptedServer) -> None:
    reasons.inference.output_format = "mistral"
    for path, body, shown in (
        ("/v1/chat/completions", CHAT, list(MISTRAL.markers)),
        ("/v1/completions", {"model": "demo", "prompt": "hi"}, []),
    ):
        edge.ask("POST", path, body)
        assert list(reasons.inference.requests.get(timeout=BOUND_S).sampling.shown_special_tokens) == shown
