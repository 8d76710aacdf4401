from __future__ import annotations

import math
import tracemalloc
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2, types_pb2
from common.errors import ContextExceeded, InvalidRequest
from common.text.chat_messages import ChatMessage, ToolCall
from decode_service.edge.request_checks import ChatPrompt, ModelLimits, check_lengths, check_request
from tests.decode_edge.edge_under_test import CONTEXT, Edge, error_of

LIMITS = ModelLimits(vocab_size=100, max_context_tokens=CONTEXT, eos_token_ids=(2,))
NAN, INF = math.nan, math.inf


def check(prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Any:
    """Checks a request with this prompt and these fields, and returns its resolved sampling options."""
    if not {"text", "token_ids", "chat"} & set(fields):
        fields["token_ids"] = inference_pb2.TokenIds(ids=prompt)
    return check_lengths(check_request(inference_pb2.GenerateRequest(**fields), LIMITS), prompt, LIMITS)


def refused_field(**fields: Any) -> str:
    """Checks a request that is wrong, and returns the field that the refusal names."""
    with pytest.raises(InvalidRequest) as refusal:
        check(**fields)
    return refusal.value.field


def chat(*messages: tuple[str, str]) -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=r, content=c) for r, c in messages])


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"text": ""}),
        ("prompt", {"token_ids": inference_pb2.TokenIds()}),
        ("prompt", {"chat": inference_pb2.Chat()}),
        ("prompt", {"prompt": (1,) * CONTEXT}),
        ("token_ids", {"prompt": (1, 100)}),
        ("chat.messages[1].role", {"chat": chat(("user", "a"), ("root", "b"))}),
        ("generated_token_ids", {"generated_token_ids": [100]}),
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 129}),
        ("request_id", {"request_id": "a\nb"}),
        ("priority", {"priority": -1}),
        ("priority", {"priority": 101}),
        ("tenant", {"tenant": ""}),
        ("tenant", {"tenant": "x" * 129}),
        ("tenant", {"tenant": "a\nb"}),
        ("lora", {"lora": "adapter"}),
        ("choice_index", {"choice_index": 128}),
        ("choice_index", {"choice_index": 2**32 - 1}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": CONTEXT + 1}),
        ("cache_salt", {"cache_salt": ""}),
        ("cache_salt", {"cache_salt": "x" * 129}),
        ("cache_salt", {"cache_salt": "", "cache_prompt": False}),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(field: str, fields: dict[str, Any]) -> None:
    assert refused_field(**fields) == field


def test_token_ids_that_do_not_fit_are_refused_before_they_are_copied() -> None:
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 1_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(ContextExceeded):
            check_request(request, LIMITS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def call(id: str, name: str = "f") -> dict[str, Any]:
    return {"id": id, "name": name, "arguments": "{}"}


def calling(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": calls, **fields}


def answer(id: str, content: str = "7", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id, **fields}


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("messages[0].tool_calls", [calling(call("x"), role="user")]),
        ("messages[0].reasoning", [{"role": "user", "content": "u", "reasoning": "r"}]),
        ("messages[0].tool_calls", [calling(*(call(str(i)) for i in range(129)))]),
        ("messages[0].tool_calls", [calling(call("x"), call("x"))]),
        ("messages[0].tool_calls", [calling(call(""), call(""))]),
        ("messages[0].tool_calls[1].name", [calling(call("x"), call("y", ""))]),
        ("messages[0].tool_calls[0].name", [calling(call("x", "f" * 257))]),
        ("messages[0].tool_calls[0].id", [calling(call("x" * 257))]),
        ("messages[0].tool_calls[1]", [calling(call("x"), call("y")), answer("x")]),
        ("messages[0].name", [{"role": "user", "name": "Ada"}]),
        ("messages[0].tool_call_id", [{"role": "user", "tool_call_id": "x"}]),
        ("messages[0].tool_call_id", [answer("x")]),
        ("messages[1].tool_call_id", [{"role": "assistant", "content": "a"}, answer("x")]),
        ("messages[1].tool_call_id", [calling(call("x")), answer("y")]),
        ("messages[1].tool_call_id", [calling(call("x")), answer("")]),
        ("messages[2].tool_call_id", [calling(call("x")), answer("x"), answer("x")]),
        ("messages[2].tool_call_id", [calling(call("x")), {"role": "user"}, answer("x")]),
        ("messages[1].name", [calling(call("x")), answer("x", name="f" * 257)]),
    ],
)
def test_wrong_calls_of_tools_are_refused_by_their_place(field: str, messages: list[Any]) -> None:
    assert refused_field(chat={"messages": messages}) == f"chat.{field}"


TALK = [{"role": "user", "content": "a"}]
TOOL: dict[str, Any] = {"name": "f", "parameters": '{"type": "object"}'}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tools", {"tools": [{**TOOL, "name": f"f{number}"} for number in range(129)]}),
        ("tools", {"tools": [{**TOOL, "description": "x" * (1 << 18)}]}),
        ("tools[0].name", {"tools": [{**TOOL, "name": ""}]}),
        ("tools[0].name", {"tools": [{**TOOL, "name": "f" * 257}]}),
        ("tools[0].name", {"tools": [{**TOOL, "name": 'f"'}]}),
        ("tools[1].name", {"tools": [TOOL, TOOL]}),
        ("tools[0].parameters", {"tools": [{**TOOL, "parameters": '{"a":' * 101 + "1" + "}" * 101}]}),
        ("tools[0].parameters", {"tools": [{**TOOL, "parameters": "[]"}]}),
        ("tools[0].parameters", {"tools": [{**TOOL, "parameters": '{"default": 1e999}'}]}),
        ("tools[0].parameters", {"tools": [{**TOOL, "parameters": "[" * 100_000}]}),
        ("tools[0].parameters", {"tools": [{**TOOL, "parameters": '{"type": "string"}'}]}),
        ("tool_choice", {"tool_choice": {"required": True}}),
        ("tool_choice.names[1]", {"tools": [TOOL], "tool_choice": {"names": ["f", "g"]}}),
        ("chat_template_kwargs", {"chat_template_kwargs": "[1]"}),
        ("chat_template_kwargs", {"chat_template_kwargs": '{"mood": NaN}'}),
        ("chat_template_kwargs", {"chat_template_kwargs": '{"a": "' + "x" * (1 << 18) + '"}'}),
        ("continue_final_message", {"continue_final_message": True}),
        ("continue_final_message", {"messages": [calling(call("x"))], "continue_final_message": True}),
        ("continue_final_message", {"messages": [calling(content=" ")], "continue_final_message": True}),
        (
            "add_generation_prompt",
            {"messages": [calling(content="a")], "continue_final_message": True, "add_generation_prompt": True},
        ),
    ],
)
def test_wrong_options_of_a_chat_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    assert refused_field(chat={"messages": TALK, **fields}) == f"chat.{field}"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"tools": [TOOL], "tool_choice": {"names": ["f", "g"]}},
            "chat.tool_choice.names[1]: 'g' is no tool's name, 'f' is",
        ),
        ({"tools": [TOOL, TOOL]}, "chat.tools[1].name: 'f' is another tool's too"),
        (
            {"tools": [{**TOOL, "name": "a b"}]},
            "chat.tools[0].name: must be 1 to 256 letters, digits, and characters of _.:/-, not 'a b'",
        ),
        ({"messages": [calling(call("x"), call("x"))]}, "chat.messages[0].tool_calls: several have the id 'x'"),
        (
            {"messages": [calling(call("x", "f" * 257))]},
            "chat.messages[0].tool_calls[0].name: has 257 characters, more than 256",
        ),
    ],
)
def test_words_about_a_chat_name_what_was_sent_and_what_would_do(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(chat={"messages": TALK, **fields})
    assert str(refusal.value).startswith(words)


def test_an_output_whose_calls_must_fit_does_not_ignore_its_end() -> None:
    chat = {"messages": TALK, "tools": [TOOL], "tool_choice": {"required": True}}
    assert check(chat=chat).grammar is not None
    assert refused_field(chat=chat, sampling={"ignore_eos": True}) == "sampling.ignore_eos"
    check(chat={**chat, "tool_choice": {}}, sampling={"ignore_eos": True})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, True)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (True, False)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (True, False)),
    ],
)
def test_an_answer_is_begun_unless_a_message_is_continued(fields: dict[str, bool], expected: tuple[bool, bool]) -> None:
    request = inference_pb2.GenerateRequest(chat={"messages": [calling(content="a")], **fields})
    prompt = check_request(request, LIMITS).prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.options.continue_final_message, prompt.options.add_generation_prompt) == expected


def test_answers_of_tools_are_told_by_the_order_of_the_calls_and_the_names() -> None:
    """Tool answers are matched to tool calls by order and name, since not every chat template writes the calls' ids."""
    messages = [calling(call("x", "f"), call("y", "g")), answer("y", "of y"), answer("x", "of x", name="mine")]
    unanswered, user, unnamed = (
        calling(call("x"), reasoning="hm"),
        {"role": "user", "content": "u"},
        {"role": "tool", "content": "t"},
    )

    checked = check_request(
        inference_pb2.GenerateRequest(chat={"messages": [*messages, unanswered, user, unnamed, calling(call(""))]}),
        LIMITS,
    )

    assert isinstance(checked.prompt, ChatPrompt)
    assert checked.prompt.messages == (
        ChatMessage("assistant", tool_calls=(ToolCall("f", "{}", "x"), ToolCall("g", "{}", "y"))),
        ChatMessage("tool", "of x", tool_call_id="x", name="mine"),
        ChatMessage("tool", "of y", tool_call_id="y", name="g"),
        ChatMessage("assistant", tool_calls=(ToolCall("f", "{}", "x"),), reasoning="hm"),
        ChatMessage("user", "u"),
        ChatMessage("tool", "t"),
        ChatMessage("assistant", tool_calls=(ToolCall("f", "{}"),)),
    )


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"token_ids": inference_pb2.TokenIds(ids=[100] * CONTEXT)}),
        ("generated_token_ids", {"text": "a", "generated_token_ids": [100] * CONTEXT}),
        ("sampling.stop_token_ids", {"text": "a", "sampling": {"stop_token_ids": [100] * 64}}),
        ("prompt", {}),
    ],
)
def test_a_list_that_is_too_long_or_absent_is_refused_before_its_entries_are_looked_at(
    field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_request(inference_pb2.GenerateRequest(**fields), LIMITS)

    assert refusal.value.field == field
    assert "vocabulary" not in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, NAN, INF, -INF, 1000.0]),
        ("top_p", [-0.5, 1.5, NAN]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("max_tokens", [CONTEXT - 2, 2**32 - 1]),
        ("min_tokens", [CONTEXT, 2**32 - 1]),
        ("repetition_penalty", [0.0, -1.0, NAN, INF]),
        ("presence_penalty", [-2.5, 2.5, NAN]),
        ("frequency_penalty", [-2.5, 2.5, NAN]),
        ("logprobs", [65, 2**32 - 1]),
        ("shown_special_tokens", [["<pad>"] * 33, ["x" * 257]]),
        ("prompt_logprobs", [65, 2**32 - 1]),
        ("stop", [[""], ["x" * 257], [str(n) for n in range(17)]]),
        ("stop_token_ids", [[100], list(range(64))]),
        ("logit_bias", [{100: 1.0}, {1: 100.5}, {1: NAN}, {1: -INF}]),
        ("bad_words", [[""], ["x" * 257], ["x"] * 129]),
        ("allowed_token_ids", [[100], [2**32 - 1], [1] * 101]),
        ("n", [0, 2]),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        assert refused_field(sampling=types_pb2.SamplingParams(**{field: value})) == f"sampling.{field}", value


def test_choices_have_indices_up_to_127_and_the_first_is_the_default() -> None:
    def taken(**fields: Any) -> int:
        return check_request(inference_pb2.GenerateRequest(text="a", **fields), LIMITS).choice_index

    assert (taken(), taken(choice_index=0), taken(choice_index=127)) == (0, 0, 127)


@pytest.mark.parametrize(
    ("fields", "cache_salt"),
    [
        ({}, ""),
        ({"cache_prompt": True}, ""),
        ({"cache_salt": "é" * 128}, "é" * 128),
        ({"cache_salt": "tenant\n", "cache_prompt": True}, "tenant\n"),
        ({"cache_prompt": False}, None),
        ({"cache_salt": "tenant", "cache_prompt": False}, None),
    ],
)
def test_a_request_uses_the_common_cache_or_its_salts_or_none(fields: dict[str, Any], cache_salt: str | None) -> None:
    checked = check_request(inference_pb2.GenerateRequest(text="a", **fields), LIMITS)
    assert checked.cache_salt == cache_salt


def test_who_asks_for_several_choices_is_told_how_to_have_them() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.n: .*send several requests, each with a choice_index"):
        check(sampling=types_pb2.SamplingParams(n=2))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0.0, 0.001, 0.7, 100.0]),
        ("top_p", [0.0, 0.01, 1.0]),
        ("top_k", [0, 1, 2**32 - 1]),
        ("min_p", [0.0, 1.0]),
        ("seed", [0, 2**64 - 1]),
        ("max_tokens", [0, 1, CONTEXT - 3]),
        ("min_tokens", [0, CONTEXT - 3]),
        ("repetition_penalty", [0.01, 1.0, 100.0]),
        ("presence_penalty", [-2.0, 2.0]),
        ("frequency_penalty", [-2.0, 2.0]),
        ("logprobs", [0, 64]),
        ("prompt_logprobs", [0, 64]),
        ("stop", [["x" * 256], [str(n) for n in range(16)]]),
        ("stop_token_ids", [list(range(63))]),
        ("logit_bias", [{99: 100.0, 0: -100.0}]),
        ("bad_words", [["x" * 256] * 128]),
        ("allowed_token_ids", [[5], [*range(100)], [5, 4, 5]]),
        ("n", [1]),
    ],
)
def test_a_sampling_value_in_range_is_taken(field: str, values: list[Any]) -> None:
    for value in values:
        check(sampling=types_pb2.SamplingParams(**{field: value}))


def test_more_bias_entries_than_the_engine_has_room_for_are_refused() -> None:
    limits = ModelLimits(vocab_size=1000, max_context_tokens=CONTEXT, eos_token_ids=())
    params = types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(513), 1.0))

    with pytest.raises(InvalidRequest, match=r"sampling\.logit_bias"):
        check_request(inference_pb2.GenerateRequest(text="x", sampling=params), limits)


def test_absent_and_zero_differ() -> None:
    absent = check()
    zero = check(sampling=types_pb2.SamplingParams(temperature=0, seed=0, logprobs=0))

    assert (absent.temperature, absent.top_p, absent.repetition_penalty, absent.num_logprobs) == (1.0, 1.0, 1.0, None)
    assert (zero.temperature, zero.seed, zero.num_logprobs) == (0.0, 0, 0)


def test_prompt_and_output_may_fill_the_context_exactly() -> None:
    assert check(prompt=(1,) * 60, sampling=types_pb2.SamplingParams(max_tokens=4)).max_tokens == 4
    assert check(prompt=(1,) * 60).max_tokens == 4


def test_ignoring_eos_leaves_no_eos_to_end_with() -> None:
    assert check(sampling=types_pb2.SamplingParams(ignore_eos=True)).end_token_ids == ()
    assert check().end_token_ids == (2,)


async def test_the_refusal_names_the_field_on_the_wire_and_nothing_reaches_the_engine(edge: Edge) -> None:
    call = edge.generate(sampling=types_pb2.SamplingParams(top_p=2.0))

    assert await error_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", {"field": "sampling.top_p"})
    assert not edge.engine.commands
    assert edge.count("baton_requests_total", outcome="invalid_field") == 1
