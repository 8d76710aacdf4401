"""Tests that chat answers have reasoning, content and function calls in OpenAI's fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from baton.v1.inference_pb2 import FINISH_REASON_EOS, FINISH_REASON_LENGTH
from baton.v1.types_pb2 import Reasoning
from common.text.output_formats import MISTRAL
from gateway.apis.chat import CHAT as API
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.answers import answered, chat_of
from tests.gateway.gateway_here import GatewayHere

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CALLS = (
    'Both.\n<tool_call>\n{"name": "look_up", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


def whole(pieces: Sequence[str], **options: Any) -> dict[str, Any]:
    answer, _ = answered(API, pieces, **options)
    (choice,) = answer["choices"]
    return dict(choice)


def chunks(pieces: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    _, events = answered(API, pieces, **options)
    return [event["choices"][0] for event in events]


def test_a_message_has_the_calls() -> None:
    choice = whole([CALLS])
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message["role"]) == ("tool_calls", "Both.", "assistant")
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "look_up", "arguments": '{"city": "Rome"}'}
    assert second["function"] == {"name": "stop", "arguments": "{}"}
    assert {each["type"] for each in (first, second)} == {"function"}
    assert all(len(each["id"]) == 9 and each["id"].isalnum() for each in (first, second)), "as Mistral's template asks"
    assert first["id"] != second["id"]


def test_a_message_of_calls_alone_has_no_content() -> None:
    assert whole([CALLS.removeprefix("Both.\n")])["message"]["content"] is None


def test_a_message_without_calls_has_none() -> None:
    choice = whole(["Hello."])
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_calls_that_the_length_cut_off_end_for_that_reason() -> None:
    cut: dict[str, Any] = {"pieces": [CALLS[:-20]], "reason": FINISH_REASON_LENGTH}
    assert whole(**cut)["finish_reason"] == chunks(**cut)[-1]["finish_reason"] == "length"


def test_a_streamed_call_begins_with_its_name_and_goes_on_with_arguments() -> None:
    pieces = ["<tool_call>", '{"name": "look_up",', ' "arguments": {"ci', 'ty": "Rome"}', "}</tool_call>"]
    begun, more, last = chunks(pieces)
    assert (begun["delta"]["role"], begun["delta"]["content"]) == ("assistant", None)
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
    *_, last = chunks(["a", " <tool_"])
    assert (last["delta"], last["finish_reason"]) == ({"content": " <tool_"}, "stop")
    *_, last = chunks([""], return_token_ids=True)
    assert last["delta"] == {"content": ""}


def test_a_stream_has_all_token_ids_of_held_text() -> None:
    parts = chunks(["<tool_call>", '{"name": ', '"stop"}'], return_token_ids=True)
    assert [part["token_ids"] for part in parts[:-1]] == [[0], [1], [2]]
    assert [part["delta"] for part in parts[:2]] == [{"role": "assistant", "content": None}, {}]


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


def streamed(edge: GatewayHere, **fields: Any) -> dict[str, Any]:
    """Returns the message that a client puts together from a stream."""
    answer = edge.ask("POST", "/v1/chat/completions", {**CHAT, "stream": True, **fields})
    message: dict[str, Any] = chat_of(answer.chunks)["choices"][0]["message"]
    return message


@pytest.mark.usefixtures("reasons")
def test_reasoning_is_apart_from_the_content(edge: GatewayHere) -> None:
    message = edge.ask("POST", "/v1/chat/completions", CHAT).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "Yes.")
    assert streamed(edge) == {"reasoning_content": "Hm.", "content": "Yes."}


def test_a_model_that_does_not_reason_has_words_only(edge: GatewayHere, reasons: ScriptedServer) -> None:
    reasons.inference.has_reasoning = False
    message = edge.ask("POST", "/v1/chat/completions", CHAT).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>Hm.</think>\n\nYes.", "refusal": None}
    assert not reasons.inference.requests.get(timeout=BOUND_S).sampling.HasField("reasoning")


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("/v1/chat/completions", {"thinking_token_budget": 9}, "thinking_token_budget"),
        ("/v1/chat/completions", {"thinking_token_budget": 0, "reasoning_effort": "none"}, None),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/chat/completions", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/chat/completions", {"reasoning": {"enabled": True, "exclude": True}}, "reasoning.enabled"),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        ("/v1/chat/completions", {"enable_thinking": False}, "enable_thinking"),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"enable_thinking": True, "a": 1}},
            "chat_template_kwargs.enable_thinking",
        ),
        ("/v1/chat/completions", {"thinking": {"type": "enabled"}, "stream": True}, "thinking"),
        ("/v1/chat/completions", {"thinking": {"type": "disabled"}}, None),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_tokens": 9}, "thinking"),
        (
            "/v1/messages",
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}, "max_tokens": 9},
            "output_config.effort, thinking",
        ),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("/v1/responses", {"thinking_token_budget": 3}, "thinking_token_budget"),
        ("/v1/responses", {"reasoning": {"enabled": True, "exclude": True}}, "reasoning.enabled"),
        ("/v1/responses", {"thinking": {"type": "adaptive"}}, "thinking"),
        ("/v1/chat/completions", {"thinking_token_budget": -1, "reasoning": {"summary": "auto"}}, None),
        ("/v1/responses", {"reasoning_effort": "none"}, None),
        ("/v1/messages", {"reasoning_effort": "none", "reasoning": {"effort": "none"}, "max_tokens": 9}, None),
        (
            "/v1/messages",
            {"reasoning_effort": "low", "enable_thinking": True, "thinking_token_budget": 9, "max_tokens": 9},
            "enable_thinking, reasoning_effort, thinking_token_budget",
        ),
        (
            "/v1/messages",
            {"reasoning": {"effort": "low"}, "verbosity": "low", "max_tokens": 9},
            "reasoning.effort, verbosity",
        ),
        ("/v1/chat/completions", {"verbosity": "high"}, "verbosity"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", {"verbosity": "low", "text": {"verbosity": "medium"}}, "verbosity"),
        (
            "/v1/completions",
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking, reasoning_effort",
        ),
        ("/v1/completions", {"thinking": {"type": "enabled"}, "max_tokens": 9}, "thinking"),
        (
            "/v1/completions",
            {"thinking": {"type": "disabled"}, "reasoning_effort": "low"},
            "reasoning_effort, thinking",
        ),
        (
            "/v1/chat/completions",
            {"enable_thinking": False, "thinking": {"type": "enabled"}},
            "enable_thinking, thinking",
        ),
    ],
)
def test_what_says_how_to_reason_is_left_out_and_named_where_it_means_nothing(
    path: str, fields: dict[str, Any], ignored: str | None, edge: GatewayHere, reasons: ScriptedServer
) -> None:
    reasons.inference.has_reasoning, reasons.inference.template_variables = False, ["a"]
    said = {"/v1/responses": {"input": "hi"}, "/v1/completions": {"prompt": "hi"}}.get(path, CHAT)
    answer = edge.ask("POST", path, {**said, "model": "demo", **fields})
    assert (answer.status, answer.headers.get("x-ignored-fields")) == (200, ignored)
    request = reasons.inference.requests.get(timeout=BOUND_S)
    assert not request.sampling.HasField("reasoning")
    assert json.loads(request.chat.chat_template_kwargs or "{}").keys() <= {"a"}


@pytest.mark.parametrize(
    ("fields", "variables", "limit"),
    [
        ({"enable_thinking": False, "reasoning_effort": "low"}, {"thinking": False, "reasoning_effort": "low"}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking": True}, 9),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}, 0),
        ({"thinking": {"type": "adaptive"}}, {}, None),
        ({"reasoning": {"enabled": True}}, {"thinking": True}, None),
        ({"reasoning": {"enabled": False}}, {"thinking": False}, 0),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": "a lot"}}, {"thinking": "a lot"}, None),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, {"thinking": True}, None),
    ],
)
def test_what_says_how_to_reason_reaches_a_template_that_reads_it(
    fields: dict[str, Any], variables: dict[str, Any], limit: int | None, edge: GatewayHere, reasons: ScriptedServer
) -> None:
    reasons.inference.template_variables = ["thinking", "reasoning_effort"]
    answer = edge.ask("POST", "/v1/chat/completions", {**CHAT, **fields})
    assert "x-ignored-fields" not in answer.headers
    request = reasons.inference.requests.get(timeout=BOUND_S)
    assert json.loads(request.chat.chat_template_kwargs or "{}") == variables
    assert request.sampling.reasoning == Reasoning(start="<think>", end="</think>", max_tokens=limit)


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (
            "/v1/messages",
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "max_tokens": 9},
            "output_config.effort",
        ),
        ("/v1/chat/completions", {"reasoning_effort": "high", "thinking_token_budget": 0}, "reasoning_effort"),
        ("/v1/chat/completions", {"reasoning_effort": "none", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("/v1/chat/completions", {"reasoning_effort": "none", "thinking_token_budget": 1}, "thinking_token_budget"),
        ("/v1/responses", {"reasoning": {"effort": "low", "enabled": False}}, "reasoning.effort"),
    ],
)
def test_how_much_to_reason_is_left_out_and_named_beside_no_reasoning(
    path: str, fields: dict[str, Any], ignored: str, edge: GatewayHere, reasons: ScriptedServer
) -> None:
    reasons.inference.template_variables = ["thinking", "reasoning_effort"]
    said = {"input": "hi"} if path == "/v1/responses" else CHAT
    answer = edge.ask("POST", path, {**said, "model": "demo", **fields})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, ignored)
    request = reasons.inference.requests.get(timeout=BOUND_S)
    assert json.loads(request.chat.chat_template_kwargs or "{}").keys() <= {"thinking"}
    assert request.sampling.reasoning.max_tokens == 0


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
    assert streamed(edge, include_reasoning=False) == {"content": "Yes."}
    assert streamed(edge, reasoning={"exclude": True}) == {"content": "Yes."}
    assert streamed(edge, thinking={"type": "adaptive", "display": "omitted"}) == {"content": "Yes."}


@pytest.mark.usefixtures("reasons")
def test_reasoning_may_be_left_out_of_a_response(edge: GatewayHere) -> None:
    body = {"model": "demo", "input": "hi", "reasoning": {"exclude": True}}
    assert [item["type"] for item in edge.ask("POST", "/v1/responses", body).json["output"]] == ["message"]
    with edge.openai().responses.stream(input="hi", model="demo", extra_body=body) as stream:
        assert not [event.type for event in stream if "reasoning" in event.type]
        assert [item.type for item in stream.get_final_response().output] == ["message"]


def test_the_text_of_chats_has_the_markers_that_are_special_tokens(edge: GatewayHere, reasons: ScriptedServer) -> None:
    reasons.inference.output_format = "mistral"
    for path, body, shown in (
        ("/v1/chat/completions", CHAT, list(MISTRAL.markers)),
        ("/v1/completions", {"model": "demo", "prompt": "hi"}, []),
    ):
        edge.ask("POST", path, body)
        assert list(reasons.inference.requests.get(timeout=BOUND_S).sampling.shown_special_tokens) == shown
