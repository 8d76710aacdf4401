"""Tests of the events of a generation and of its ending. The same rules hold for both clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, assert_type

import pydantic
import pytest
from google.rpc import code_pb2

from baton import (
    AsyncClient,
    ChatMessage,
    Client,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Reasoning,
    Started,
    Tool,
    ToolChoice,
    errors,
)
from baton.client import PrefillClient
from baton.events import PositionLogprobs, PromptLogprobs, PromptToken, TokenLogprob, Usage
from baton.v1 import inference_pb2, types_pb2
from tests.client.either_client import EitherClient
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, prompt_tokens, started


async def test_tokens_of_the_prompt_come_with_their_log_probabilities(
    server: ScriptedServer, either: EitherClient
) -> None:
    server.inference.script = [
        started(),
        prompt_tokens(0, (5, b"a", None)),
        prompt_tokens(1, (6, b"b", -0.5), (7, b"c", -1.5)),
        finished(),
    ]
    expected = (
        PromptToken(5, b"a", None, None, ()),
        PromptToken(6, b"b", -0.5, 2, ()),
        PromptToken(7, b"c", -1.5, 2, ()),
    )
    _, first, others, _ = await either.events("Hi", prompt_logprobs=0, max_tokens=0)
    assert (first, others) == (PromptLogprobs(0, expected[:1]), PromptLogprobs(1, expected[1:]))
    assert (await either.complete("Hi", prompt_logprobs=0, max_tokens=0)).prompt_logprobs == expected


@pytest.mark.parametrize(
    "script",
    [
        [started(), delta([5], "a"), prompt_tokens(0, (5, b"a", None))],
        [started(), prompt_tokens(1, (5, b"a", -1.0))],
        [prompt_tokens(0, (5, b"a", None))],
    ],
    ids=["after output", "with a gap", "before the start"],
)
async def test_tokens_of_the_prompt_in_another_place_are_an_error(
    script: list[Any], server: ScriptedServer, either: EitherClient
) -> None:
    server.inference.script = [*script, finished()]
    with pytest.raises(errors.Internal):
        await either.events("Hi")


async def test_events_arrive_typed_and_in_order(server: ScriptedServer, either: EitherClient) -> None:
    end = finished(inference_pb2.FINISH_REASON_STOP_TOKEN, 3, stop_token_id=0)
    server.inference.script = [started(), delta([5, 6], "Hel"), delta([7], "lo"), end]
    first, second, third, last = await either.events("Hi")
    assert first == Started(request_id="r1", num_prompt_tokens=3, seed=7)
    assert second == Delta(token_ids=(5, 6), text="Hel", logprobs=())
    assert third == Delta(token_ids=(7,), text="lo", logprobs=())
    assert isinstance(last, Finished)
    assert (last.reason, last.matched_stop) == (FinishReason.STOP_TOKEN, 0)
    assert (last.usage, last.speculation) == (Usage(3, 3), None)


async def test_complete_adds_the_deltas_up(server: ScriptedServer, either: EitherClient) -> None:
    logprobs = types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=5, logprob=-0.5, token=b"Hel"),
        top=[types_pb2.TokenLogprob(token_id=9, logprob=-0.25, token=b"\xe2")],
    )
    server.inference.script = [
        started(),
        delta([5], "Hel", [logprobs]),
        delta([6], "lo", [logprobs]),
        finished(inference_pb2.FINISH_REASON_STOP_STRING, 2, stop_string="END"),
    ]
    completion = await either.complete("Hi")
    assert (completion.text, completion.token_ids) == ("Hello", (5, 6))
    assert (
        completion.logprobs
        == (PositionLogprobs(TokenLogprob(5, -0.5, b"Hel"), (TokenLogprob(9, -0.25, b"\xe2"),)),) * 2
    )
    assert (completion.finish_reason, completion.matched_stop) == (FinishReason.STOP_STRING, "END")
    assert (completion.request_id, completion.seed, completion.usage) == ("r1", 7, Usage(3, 2))
    assert (completion.timings.prefill_s, completion.timings.kv_bytes) == (0.5, 1000)


class Even(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def _is_even(cls, number: int) -> int:
        if number % 2:
            raise ValueError("is odd")
        return number


WROTE_2 = [started(), delta([5], '{"numb'), delta([6], 'er": 2}'), finished(inference_pb2.FINISH_REASON_EOS, 2)]
WROTE_3 = [started(), delta([5], '{"number": 3}'), finished(inference_pb2.FINISH_REASON_EOS, 1)]


@pytest.mark.parametrize(
    ("json_schema", "sent", "parsed"),
    [
        ({"type": "object"}, '{"type": "object"}', {"number": 2}),
        ("{}", "{}", {"number": 2}),
        (Even, json.dumps(Even.model_json_schema()), Even(number=2)),
        (None, "", None),
    ],
    ids=["object", "text", "class", "none"],
)
async def test_an_answer_is_parsed_as_its_schema_says(
    server: ScriptedServer, either: EitherClient, json_schema: Any, sent: str, parsed: object
) -> None:
    server.inference.script = WROTE_2
    completion = await either.complete("Hi", json_schema=json_schema)
    assert (completion.parsed, completion.text) == (parsed, '{"number": 2}')
    assert server.inference.requests.get(timeout=BOUND_S).sampling.json_schema == sent


@pytest.mark.parametrize(("is_open", "text"), [(True, 'Hm.</r>{"number": 2}'), (False, '<r></r>{"number": 2}')])
async def test_an_answer_is_parsed_after_its_reasoning(
    server: ScriptedServer, either: EitherClient, is_open: bool, text: str
) -> None:
    first = started()
    first.started.is_reasoning_open = is_open
    server.inference.script = [first, delta([5], text), finished(inference_pb2.FINISH_REASON_EOS, 1)]
    answer = await either.complete("Hi", json_schema={}, reasoning=Reasoning("<r>", "</r>"), shown_special_tokens=[])
    assert (answer.parsed, answer.text) == ({"number": 2}, text)
    assert not server.inference.requests.get(timeout=BOUND_S).sampling.shown_special_tokens


TOOL = Tool("f")
FORMS_OF_CALLS = [
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    '\n{"name": "f", "arguments": {}}\n',
    '[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]',
    '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}',
    "f{}",
]
EOS = inference_pb2.FINISH_REASON_EOS


@pytest.mark.parametrize(
    ("text", "reason", "options"),
    [
        ("12", inference_pb2.FINISH_REASON_LENGTH, {}),
        ("12", inference_pb2.FINISH_REASON_STOP_STRING, {}),
        ("12", inference_pb2.FINISH_REASON_STOP_TOKEN, {}),
        ("12", EOS, {"generated_token_ids": [4]}),
        ("12", EOS, {"include_stop_str_in_output": True}),
        *((text, EOS, {"tools": (TOOL,), "json_schema": schema}) for text in FORMS_OF_CALLS for schema in ({}, Even)),
    ],
)
async def test_what_was_cut_what_is_more_than_the_answer_and_calls_of_tools_are_not_parsed(
    server: ScriptedServer, either: EitherClient, text: str, reason: Any, options: dict[str, Any]
) -> None:
    server.inference.script = [started(), delta([5], text), finished(reason, 1)]
    completion = await either.complete(**{"chat": [ChatMessage("user", "Hi")], "json_schema": {}, **options})
    assert (completion.text, completion.parsed) == (text, None)


async def test_an_answer_beside_tools_is_parsed(server: ScriptedServer, either: EitherClient) -> None:
    chat: dict[str, Any] = {"chat": [ChatMessage("user", "Hi")], "tools": [TOOL], "json_schema": Even}
    server.inference.script = WROTE_2
    assert (await either.complete(**chat)).parsed == Even(number=2)
    server.inference.script = WROTE_3
    with pytest.raises(pydantic.ValidationError, match="is odd"):
        await either.complete(**chat)


async def test_an_answer_in_channels_is_parsed_after_its_header(server: ScriptedServer, either: EitherClient) -> None:
    reasoning = Reasoning("<|channel|>analysis<|message|>", "<|end|>")
    said = '<|channel|>analysis<|message|>2?<|end|><|start|>assistant<|channel|>final<|message|>{"number": 2}'
    server.inference.script = [started(), delta([5], said), finished(inference_pb2.FINISH_REASON_EOS, 1)]
    given: list[dict[str, Any]] = [{}, {"reasoning": reasoning}]
    for options in given:
        assert (await either.complete("Hi", json_schema={}, **options)).parsed == {"number": 2}
        shown = "".join(server.inference.requests.get(timeout=BOUND_S).sampling.shown_special_tokens)
        assert all(each in shown for each in ("<|start|>", "<|channel|>", "<|message|>"))


def test_the_type_of_an_answer_is_its_schemas(server: ScriptedServer, client: Client) -> None:
    """The type checker evaluates the `assert_type` calls of this test."""
    server.inference.script = WROTE_2
    answer = assert_type(client.complete("Hi", json_schema=Even), Completion[Even])
    assert answer.parsed is not None and answer.parsed.number == 2
    assert_type(client.complete("Hi", json_schema={}), Completion[Any])
    assert_type(client.complete("Hi"), Completion[Any])


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (
            {"temperature": 0.0, "seed": 2**64 - 1, "stop": ["a", "b"], "logit_bias": {4: -1.0}, "top_p": None},
            {"sampling": {"temperature": 0.0, "seed": 2**64 - 1, "stop": ["a", "b"], "logit_bias": {4: -1.0}}},
        ),
        ({"top_p": 1e-50, "min_p": 1e-50}, {"sampling": {"top_p": 2**-149, "min_p": 2**-149}}),
        ({"choice": ["a", "b"]}, {"sampling": {"choice": {"texts": ["a", "b"]}}}),
        ({"choice": []}, {"sampling": {"choice": {}}}),
        ({"ebnf": 'root ::= "a"'}, {"sampling": {"ebnf": 'root ::= "a"'}}),
        (
            {"truncate_prompt_tokens": -1, "priority": -3, "tenant": "a"},
            {"truncate_prompt_tokens": -1, "priority": -3, "tenant": "a"},
        ),
        (
            {"bad_words": ["bad", "worse"], "allowed_token_ids": (3, 1)},
            {"sampling": {"bad_words": ["bad", "worse"], "allowed_token_ids": [3, 1]}},
        ),
        *(
            (options, {"sampling": options})
            for options in (
                {"skip_special_tokens": False, "include_stop_str_in_output": True},
                {"shown_special_tokens": ["[ARGS]", "[THINK]"]},
                {"prompt_logprobs": 0, "max_tokens": 0},
            )
        ),
        (
            {"reasoning": Reasoning("<r>", "</r>", max_tokens=0)},
            {
                "sampling": {
                    "reasoning": {"start": "<r>", "end": "</r>", "max_tokens": 0},
                    "shown_special_tokens": ["<r>", "</r>"],
                }
            },
        ),
        (
            {"token_ids": [1, 2], "generated_token_ids": [3], "request_id": "mine"},
            {"token_ids": {"ids": [1, 2]}, "generated_token_ids": [3], "request_id": "mine"},
        ),
        ({"choice_index": 0}, {"choice_index": 0}),
        ({"choice_index": 3}, {"choice_index": 3}),
        ({"cache_salt": "tenant", "cache_prompt": False}, {"cache_salt": "tenant", "cache_prompt": False}),
        ({"token_ids": []}, {"token_ids": {}}),
        ({"chat": []}, {"chat": {}}),
        (
            {
                "chat": [ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")],
                "tools": [Tool("f", "does it", '{"type": "object"}', strict=True)],
                "tool_choice": ToolChoice(required=True, names=("f",), parallel=False),
                "chat_template_kwargs": {"mood": "ok"},
                "continue_final_message": False,
                "add_generation_prompt": False,
            },
            {
                "chat": {
                    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
                    "tools": [
                        {"name": "f", "description": "does it", "parameters": '{"type": "object"}', "strict": True}
                    ],
                    "tool_choice": {"required": True, "names": ["f"], "parallel": False},
                    "chat_template_kwargs": '{"mood": "ok"}',
                    "add_generation_prompt": False,
                }
            },
        ),
    ],
)
async def test_absent_options_stay_absent_and_zero_travels(
    server: ScriptedServer, either: EitherClient, options: dict[str, Any], sent: dict[str, Any]
) -> None:
    server.inference.script = [started(), finished()]
    prompt = {} if {"token_ids", "chat"} & set(options) else {"text": "Hi"}
    await either.complete(prompt.get("text"), **options)
    assert server.inference.requests.get(timeout=BOUND_S) == inference_pb2.GenerateRequest(
        **{"sampling": {}, **prompt, **sent}
    )


async def test_the_end_counts_tokens_that_were_reasoning_and_those_that_were_cached(
    server: ScriptedServer, either: EitherClient
) -> None:
    end = finished(num_completion_tokens=3, num_cached_tokens=2)
    end.finished.usage.num_reasoning_tokens = 2
    server.inference.script = [started(), end]
    answer = await either.complete("Hi")
    assert answer.usage == Usage(num_prompt_tokens=3, num_completion_tokens=3, num_reasoning_tokens=2)
    assert answer.timings.num_cached_tokens == 2


async def test_the_timeout_is_the_requests_deadline(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete("Hi", timeout_s=100.0)
    remaining_s = server.inference.deadlines_s.get(timeout=BOUND_S)
    assert remaining_s is not None
    assert 50.0 < remaining_s < 150.0


async def test_a_passed_deadline_raises_and_ends_the_call(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    await either.call("load")  # it is connected
    for timeout_s in (0.5, 5.0, 50.0):  # on a busy machine, the first may pass before the request is sent
        with pytest.raises(errors.DeadlineExceeded):
            await either.complete("Hi", timeout_s=timeout_s)
        if not server.inference.requests.empty():
            break
    assert server.inference.call_ended.wait(BOUND_S)


@pytest.mark.parametrize(
    ("code", "kind", "detail"),
    [
        (code_pb2.INVALID_ARGUMENT, errors.InvalidArgument, {"reason": "INVALID_FIELD", "field": "top_p"}),
        (code_pb2.ALREADY_EXISTS, errors.AlreadyExists, {}),
        (code_pb2.RESOURCE_EXHAUSTED, errors.ResourceExhausted, {}),
        (code_pb2.FAILED_PRECONDITION, errors.FailedPrecondition, {}),
        (code_pb2.UNAVAILABLE, errors.Unavailable, {}),
        (code_pb2.CANCELLED, errors.Cancelled, {}),
        (code_pb2.INTERNAL, errors.Internal, {}),
        (code_pb2.DATA_LOSS, errors.BatonError, {}),
    ],
)
async def test_every_code_has_its_error(
    server: ScriptedServer, either: EitherClient, code: int, kind: type[errors.BatonError], detail: dict[str, str]
) -> None:
    server.inference.script = [started(), delta([1], "a"), failure(code, "because", **detail)]
    with pytest.raises(kind, match="because") as caught:
        await either.events("Hi")
    assert (type(caught.value), caught.value.code.value[0]) == (kind, code)
    assert (caught.value.reason, caught.value.field) == (detail.get("reason", ""), detail.get("field"))


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([started()], id="no terminal event"),
        pytest.param([], id="no event"),
        pytest.param([delta([1], "a"), finished()], id="a delta before Started"),
        pytest.param([started(), started(), finished()], id="Started twice"),
        pytest.param([started(), finished(), delta([1], "a")], id="a delta after Finished"),
        pytest.param([started(), inference_pb2.GenerateEvent()], id="an unknown event"),
        pytest.param([started(), finished(inference_pb2.FINISH_REASON_UNSPECIFIED)], id="an unknown reason"),
    ],
)
async def test_a_server_that_breaks_the_order_is_an_internal_error(
    server: ScriptedServer, either: EitherClient, script: list[Any]
) -> None:
    server.inference.script = script
    with pytest.raises(errors.Internal) as caught:
        await either.events("Hi")
    assert caught.value.reason == "PROTOCOL"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({}, "prompt"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"prompt": "a", "top_k": -1}, "sampling.top_k"),
        ({"prompt": "a", "seed": 2**64}, "sampling.seed"),
        ({"prompt": "a", "stop": "END"}, "sampling.stop"),
        ({"prompt": "a", "logit_bias": {-1: 0.0}}, "sampling.logit_bias"),
        ({"prompt": "a", "logit_bias": [1]}, "sampling.logit_bias"),
        ({"prompt": "a", "bad_words": "word"}, "sampling.bad_words"),
        ({"prompt": "a", "allowed_token_ids": []}, "sampling.allowed_token_ids"),
        ({"prompt": "a", "regex": "a", "json_schema": "{}"}, "sampling.json_schema"),
        ({"prompt": "a", "lark": "start: A", "regex": "a"}, "sampling.regex"),
        ({"prompt": "a", "choice": ["a"], "ebnf": "a"}, "sampling.ebnf"),
        ({"prompt": "a", "choice": "ab"}, "sampling.choice"),
        ({"prompt": "a", "json_schema": {"a": {1}}}, "sampling.json_schema"),
        ({"prompt": "a", "json_schema": {"a": float("nan")}}, "sampling.json_schema"),
        ({"prompt": "a", "reasoning": "</r>"}, "sampling.reasoning"),
        ({"prompt": "a", "choice_index": -1}, "choice_index"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt"),
        ({"prompt": "a", "cache_prompt": "no"}, "cache_prompt"),
        ({"prompt": "a", "tools": []}, "chat.tools"),
        ({"prompt": "a", "add_generation_prompt": True}, "chat.add_generation_prompt"),
        ({"prompt": "a", "reasoning": Reasoning("<r>", "</r>", max_tokens=-1)}, "sampling.reasoning"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"chat": [ChatMessage("user", "a"), ChatMessage("user", "\ud800")]}, "chat.messages[1]"),
        ({"chat": [{"role": "user"}]}, "chat.messages[0]"),
        ({"prompt": "a", "json_schema": 5}, "sampling.json_schema"),
        ({"prompt": "a", "timeout_s": float("nan")}, "timeout_s"),
        ({"prompt": "a", "timeout_s": "5"}, "timeout_s"),
        ({"chat": 5}, "chat"),
    ],
)
async def test_what_the_wire_cannot_carry_is_refused_by_name(
    either: EitherClient, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        await either.events(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "sampling.seed: -1 is not in [0, 18446744073709551615]"),
        ({"logit_bias": {-1: 0.0}}, "sampling.logit_bias: -1 is not in [0, 4294967295]"),
        ({"stop": [1]}, "sampling.stop: has a value of another type"),
        ({"tool_choice": "auto", "chat": [ChatMessage("user", "a")]}, "chat.tool_choice: has a value of another type"),
        ({"json_schema": {"const": float("nan")}}, "sampling.json_schema: has a number that JSON lacks"),
    ],
)
async def test_a_refusal_is_in_words_of_its_own(either: EitherClient, options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        await either.events(**({} if "chat" in options else {"prompt": "a"}), **options)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("kind", [partial(Client, resume=True), partial(AsyncClient, resume=True), PrefillClient])
@pytest.mark.parametrize(
    ("field", "seconds"), [("rpc_timeout_s", None), ("resume_timeout_s", "x"), ("admission_timeout_s", float("nan"))]
)
async def test_a_timeout_of_a_client_is_refused_by_name(kind: Any, field: str, seconds: Any) -> None:
    field = "rpc_timeout_s" if kind is PrefillClient else field  # it has no other
    with pytest.raises(errors.InvalidArgument, match=f"^{field}: .* is no number of seconds"):
        kind("127.0.0.1:1", **{field: seconds})


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12, 10**400])
async def test_a_timeout_without_an_end_is_none(server: ScriptedServer, either: EitherClient, timeout_s: float) -> None:
    server.inference.script = [started(), finished()]
    await either.complete("Hi", timeout_s=timeout_s)
    with PrefillClient(server.address, rpc_timeout_s=timeout_s) as prefill, pytest.raises(errors.Unimplemented):
        prefill.load()


async def test_an_option_that_does_not_exist_is_a_type_error(either: EitherClient) -> None:
    with pytest.raises(TypeError, match="temprature"):
        await either.events("Hi", temprature=1.0)


def test_closing_the_stream_cancels_the_call_and_ends_the_reading(server: ScriptedServer, client: Client) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    with client.generate("Hi") as events:
        next(events)
        assert not server.inference.call_ended.is_set()
    assert server.inference.call_ended.wait(BOUND_S)
    with pytest.raises(errors.Cancelled):
        next(events)


def test_dropping_the_stream_cancels_the_call(server: ScriptedServer, client: Client) -> None:
    server.inference.script = [started(), server.inference.HOLD]

    def read_one(events: Iterator[Event]) -> Event:
        return next(events)

    read_one(client.generate("Hi"))
    assert server.inference.call_ended.wait(BOUND_S)


async def test_closing_the_async_stream_cancels_the_call(server: ScriptedServer, async_client: AsyncClient) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    async with async_client.generate("Hi") as events:
        await anext(events)
        assert not server.inference.call_ended.is_set()
    assert server.inference.call_ended.wait(BOUND_S)


@pytest.mark.parametrize("is_reading", [False, True])
async def test_reading_a_closed_async_stream_is_an_error_and_does_not_cancel_the_reader(
    server: ScriptedServer, async_client: AsyncClient, is_reading: bool
) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    events = async_client.generate("Hi")
    await anext(events)
    if is_reading:
        reading = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
    await events.aclose()
    with pytest.raises(errors.Cancelled, match="the stream was closed"):
        await asyncio.wait_for(reading if is_reading else anext(events), BOUND_S)


async def test_breaking_out_of_the_async_stream_cancels_the_call(
    server: ScriptedServer, async_client: AsyncClient
) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    async for _ in async_client.generate("Hi"):
        break
    assert server.inference.call_ended.wait(BOUND_S)


async def test_cancelling_the_reading_task_cancels_the_call(server: ScriptedServer, async_client: AsyncClient) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    has_started = asyncio.Event()

    async def read() -> None:
        async for _ in async_client.generate("Hi"):
            has_started.set()

    reading = asyncio.create_task(read())
    await asyncio.wait_for(has_started.wait(), BOUND_S)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert server.inference.call_ended.wait(BOUND_S)
