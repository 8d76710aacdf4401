"""Tests of the events of a generation and of its ending. The same rules hold for both clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Protocol, assert_type

import grpc
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
from baton.events import PositionLogprobs, PromptLogprobs, PromptToken, TokenLogprob, Usage
from baton.v1 import inference_pb2, types_pb2
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, prompt_tokens, started


class EitherClient(Protocol):
    async def events(self, prompt: str | None = None, **options: Any) -> list[Event]: ...

    async def complete(self, prompt: str | None = None, **options: Any) -> Completion: ...


class Blocking:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def events(self, prompt: str | None = None, **options: Any) -> list[Event]:
        return list(self._client.generate(prompt, **options))

    async def complete(self, prompt: str | None = None, **options: Any) -> Completion:
        return self._client.complete(prompt, **options)


class Asynchronous:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def events(self, prompt: str | None = None, **options: Any) -> list[Event]:
        return [event async for event in self._client.generate(prompt, **options)]

    async def complete(self, prompt: str | None = None, **options: Any) -> Completion:
        return await self._client.complete(prompt, **options)


@pytest.fixture(params=["Client", "AsyncClient"])
async def either(request: pytest.FixtureRequest, client: Client, async_client: AsyncClient) -> EitherClient:
    return Blocking(client) if request.param == "Client" else Asynchronous(async_client)


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
    sent = server.inference.requests.get(timeout=BOUND_S).sampling
    assert sent.HasField("prompt_logprobs") and sent.HasField("max_tokens")


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
    server.inference.script = [started(), delta([5, 6], "Hel"), delta([7], "lo"), finished(num_completion_tokens=3)]
    first, second, third, last = await either.events("Hi")
    assert first == Started(request_id="r1", num_prompt_tokens=3, seed=7)
    assert second == Delta(token_ids=(5, 6), text="Hel", logprobs=())
    assert third == Delta(token_ids=(7,), text="lo", logprobs=())
    assert isinstance(last, Finished)
    assert (last.reason, last.usage, last.speculation) == (FinishReason.LENGTH, Usage(3, 3), None)


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


async def test_a_stop_token_id_is_reported_as_a_number(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished(inference_pb2.FINISH_REASON_STOP_TOKEN, stop_token_id=0)]
    assert (await either.complete("Hi")).matched_stop == 0


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


@pytest.mark.parametrize(
    "reason",
    [
        inference_pb2.FINISH_REASON_LENGTH,
        inference_pb2.FINISH_REASON_STOP_STRING,
        inference_pb2.FINISH_REASON_STOP_TOKEN,
    ],
)
async def test_an_answer_that_was_cut_is_not_parsed(server: ScriptedServer, either: EitherClient, reason: Any) -> None:
    server.inference.script = [started(), delta([5], "12"), finished(reason, 1)]
    completion = await either.complete("Hi", json_schema={"type": "integer"})
    assert (completion.text, completion.parsed) == ("12", None)


@pytest.mark.parametrize("options", [{"generated_token_ids": [4]}, {"include_stop_str_in_output": True}])
async def test_a_text_that_is_not_just_the_answer_is_not_parsed(
    server: ScriptedServer, either: EitherClient, options: dict[str, Any]
) -> None:
    server.inference.script = WROTE_2
    assert (await either.complete("Hi", json_schema={}, **options)).parsed is None


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


@pytest.mark.parametrize("json_schema", [{}, Even], ids=["object", "class"])
@pytest.mark.parametrize("text", FORMS_OF_CALLS)
async def test_calls_of_tools_are_not_parsed(
    server: ScriptedServer, either: EitherClient, json_schema: Any, text: str
) -> None:
    server.inference.script = [started(), delta([5], text), finished(inference_pb2.FINISH_REASON_EOS, 1)]
    answer = await either.complete(chat=[ChatMessage("user", "Hi")], tools=iter([TOOL]), json_schema=json_schema)
    assert (answer.parsed, answer.text) == (None, text)


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


async def test_a_class_may_refuse_an_answer(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = WROTE_3
    with pytest.raises(pydantic.ValidationError, match="is odd"):
        await either.complete("Hi", json_schema=Even)


def test_the_type_of_an_answer_is_its_schemas(server: ScriptedServer, client: Client) -> None:
    """The type checker evaluates the `assert_type` calls of this test."""
    server.inference.script = WROTE_2
    answer = assert_type(client.complete("Hi", json_schema=Even), Completion[Even])
    assert answer.parsed is not None and answer.parsed.number == 2
    assert_type(client.complete("Hi", json_schema={}), Completion[Any])
    assert_type(client.complete("Hi"), Completion[Any])


async def test_texts_to_choose_from_and_a_grammar_travel(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete("Hi", choice=["a", "b"])
    assert server.inference.requests.get(timeout=BOUND_S).sampling.choice.texts == ["a", "b"]
    await either.complete("Hi", choice=[])
    assert server.inference.requests.get(timeout=BOUND_S).sampling.WhichOneof("grammar") == "choice"
    await either.complete("Hi", ebnf='root ::= "a"')
    assert server.inference.requests.get(timeout=BOUND_S).sampling.ebnf == 'root ::= "a"'


async def test_absent_options_stay_absent_and_zero_travels(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete("Hi", temperature=0.0, seed=2**64 - 1, stop=["a", "b"], logit_bias={4: -1.0}, top_p=None)
    request = server.inference.requests.get(timeout=BOUND_S)
    assert request.text == "Hi"
    assert not any(map(request.HasField, ("request_id", "choice_index", "cache_salt", "cache_prompt")))
    assert {field.name for field, _ in request.sampling.ListFields()} == {"temperature", "seed", "stop", "logit_bias"}
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 2**64 - 1)
    assert dict(request.sampling.logit_bias) == {4: -1.0}


async def test_options_that_are_not_sampled_by_travel(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete("Hi", truncate_prompt_tokens=-1, priority=-3, tenant="a")
    request = server.inference.requests.get(timeout=BOUND_S)
    assert (request.HasField("truncate_prompt_tokens"), request.truncate_prompt_tokens) == (True, -1)
    assert (request.HasField("priority"), request.priority, request.tenant) == (True, -3, "a")


async def test_what_is_ruled_out_travels(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete("Hi", bad_words=["bad", "worse"], allowed_token_ids=(3, 1))
    sampling = server.inference.requests.get(timeout=BOUND_S).sampling
    assert (list(sampling.bad_words), list(sampling.allowed_token_ids)) == (["bad", "worse"], [3, 1])


async def test_what_the_text_has_travels(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    shown = ["[ARGS]", "[THINK]"]
    await either.complete("Hi", skip_special_tokens=False, shown_special_tokens=shown, include_stop_str_in_output=True)
    sampling = server.inference.requests.get(timeout=BOUND_S).sampling
    assert (sampling.HasField("skip_special_tokens"), sampling.skip_special_tokens) == (True, False)
    assert sampling.include_stop_str_in_output
    assert list(sampling.shown_special_tokens) == shown


async def test_reasoning_travels_and_its_tokens_come_back(server: ScriptedServer, either: EitherClient) -> None:
    end = finished(num_completion_tokens=3)
    end.finished.usage.num_reasoning_tokens = 2
    server.inference.script = [started(), end]
    answer = await either.complete("Hi", reasoning=Reasoning("<r>", "</r>", max_tokens=0))
    assert server.inference.requests.get(timeout=BOUND_S).sampling == types_pb2.SamplingParams(
        reasoning=types_pb2.Reasoning(start="<r>", end="</r>", max_tokens=0), shown_special_tokens=["<r>", "</r>"]
    )
    assert answer.usage == Usage(num_prompt_tokens=3, num_completion_tokens=3, num_reasoning_tokens=2)


async def test_token_ids_and_a_resumed_output_travel(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete(token_ids=[1, 2], generated_token_ids=[3], request_id="mine")
    request = server.inference.requests.get(timeout=BOUND_S)
    assert (list(request.token_ids.ids), list(request.generated_token_ids)) == ([1, 2], [3])
    assert request.request_id == "mine"


async def test_a_choice_index_travels_and_one_that_cannot_is_refused_by_name(
    server: ScriptedServer, either: EitherClient
) -> None:
    server.inference.script = [started(), finished()]
    for choice_index in (0, 3):
        await either.complete("Hi", choice_index=choice_index)
        request = server.inference.requests.get(timeout=BOUND_S)
        assert request.HasField("choice_index") and request.choice_index == choice_index
    with pytest.raises(errors.InvalidArgument) as refusal:
        await either.complete("Hi", choice_index=-1)
    assert refusal.value.field == "choice_index"


async def test_the_options_of_the_prefix_cache_travel_and_those_that_cannot_are_refused_by_name(
    server: ScriptedServer, either: EitherClient
) -> None:
    server.inference.script = [started(), finished()]
    await either.complete("Hi", cache_salt="tenant", cache_prompt=False)
    request = server.inference.requests.get(timeout=BOUND_S)
    assert (request.cache_salt, request.HasField("cache_prompt"), request.cache_prompt) == ("tenant", True, False)
    for name, value in (("cache_salt", 7), ("cache_salt", "\ud800"), ("cache_prompt", "no")):
        with pytest.raises(errors.InvalidArgument) as refusal:
            await either.complete("Hi", **{name: value})
        assert refusal.value.field == name


async def test_the_end_says_how_many_prompt_tokens_were_cached(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished(num_cached_tokens=2)]
    assert (await either.complete("Hi")).timings.num_cached_tokens == 2


@pytest.mark.parametrize(("source", "kind"), [({"token_ids": []}, "token_ids"), ({"chat": []}, "chat")])
async def test_an_empty_prompt_is_the_servers_to_refuse(
    server: ScriptedServer, either: EitherClient, source: dict[str, Any], kind: str
) -> None:
    server.inference.script = [started(), finished()]
    await either.complete(**source)
    assert server.inference.requests.get(timeout=BOUND_S).WhichOneof("prompt") == kind


async def test_a_chat_s_options_travel_with_it(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete(
        chat=[ChatMessage("user", "Hi")],
        tools=[Tool("f", "does it", '{"type": "object"}', strict=True)],
        tool_choice=ToolChoice(required=True, names=("f",), parallel=False),
        chat_template_kwargs={"mood": ["é"]},
        continue_final_message=False,
        add_generation_prompt=False,
    )
    chat = server.inference.requests.get(timeout=BOUND_S).chat
    tool = inference_pb2.Tool(name="f", description="does it", parameters='{"type": "object"}', strict=True)
    choice = inference_pb2.ToolChoice(required=True, names=["f"], parallel=False)
    assert (list(chat.tools), chat.tool_choice) == ([tool], choice)
    assert json.loads(chat.chat_template_kwargs) == {"mood": ["é"]}
    assert (chat.continue_final_message, chat.add_generation_prompt) == (False, False)
    assert chat.HasField("add_generation_prompt")


@pytest.mark.parametrize(
    ("options", "field"),
    [({"tools": []}, "tools"), ({"add_generation_prompt": True}, "add_generation_prompt")],
)
async def test_a_chat_s_options_go_with_chats_only(either: EitherClient, options: Any, field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as error:
        await either.complete("Hi", **options)
    assert error.value.field == f"chat.{field}"


async def test_a_chat_travels_with_its_roles(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete(chat=[ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")])
    messages = server.inference.requests.get(timeout=BOUND_S).chat.messages
    assert [(message.role, message.content) for message in messages] == [("system", "Be brief."), ("user", "Hi")]


async def test_the_timeout_is_the_requests_deadline(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), finished()]
    await either.complete("Hi", timeout_s=100.0)
    remaining_s = server.inference.deadlines_s.get(timeout=BOUND_S)
    assert remaining_s is not None
    assert 50.0 < remaining_s < 150.0


async def test_a_passed_deadline_raises_and_ends_the_call(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    with pytest.raises(errors.DeadlineExceeded):
        await either.complete("Hi", timeout_s=0.2)
    assert server.inference.call_ended.wait(BOUND_S)


async def test_an_error_names_its_field(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [
        failure(code_pb2.INVALID_ARGUMENT, "top_p: must be in (0, 1]", reason="INVALID_FIELD", field="top_p")
    ]
    with pytest.raises(errors.InvalidArgument, match="must be in") as caught:
        await either.complete("Hi", top_p=2.0)
    assert (caught.value.field, caught.value.reason) == ("top_p", "INVALID_FIELD")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (code_pb2.ALREADY_EXISTS, errors.AlreadyExists),
        (code_pb2.RESOURCE_EXHAUSTED, errors.ResourceExhausted),
        (code_pb2.FAILED_PRECONDITION, errors.FailedPrecondition),
        (code_pb2.UNAVAILABLE, errors.Unavailable),
        (code_pb2.CANCELLED, errors.Cancelled),
        (code_pb2.INTERNAL, errors.Internal),
    ],
)
async def test_every_code_has_its_error(
    server: ScriptedServer, either: EitherClient, code: int, kind: type[errors.BatonError]
) -> None:
    server.inference.script = [started(), delta([1], "a"), failure(code, "because")]
    with pytest.raises(kind, match="because") as caught:
        await either.events("Hi")
    assert type(caught.value) is kind
    assert (caught.value.reason, caught.value.metadata, caught.value.field) == ("", {}, None)


async def test_a_code_without_a_class_is_a_plain_baton_error(server: ScriptedServer, either: EitherClient) -> None:
    server.inference.script = [failure(code_pb2.DATA_LOSS, "gone")]
    with pytest.raises(errors.BatonError) as caught:
        await either.events("Hi")
    assert (type(caught.value), caught.value.code) == (errors.BatonError, grpc.StatusCode.DATA_LOSS)


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
        ({"prompt": "a", "bad_words": "word"}, "sampling.bad_words"),
        ({"prompt": "a", "allowed_token_ids": []}, "sampling.allowed_token_ids"),
        ({"prompt": "a", "regex": "a", "json_schema": "{}"}, "sampling.json_schema"),
        ({"prompt": "a", "lark": "start: A", "regex": "a"}, "sampling.regex"),
        ({"prompt": "a", "choice": ["a"], "ebnf": "a"}, "sampling.ebnf"),
        ({"prompt": "a", "choice": "ab"}, "sampling.choice"),
        ({"prompt": "a", "json_schema": {"a": {1}}}, "sampling.json_schema"),
        ({"prompt": "a", "json_schema": {"a": float("nan")}}, "sampling.json_schema"),
        ({"prompt": "a", "reasoning": "</r>"}, "sampling.reasoning"),
        ({"prompt": "a", "reasoning": Reasoning("<r>", "</r>", max_tokens=-1)}, "sampling.reasoning"),
    ],
)
async def test_what_the_wire_cannot_carry_is_refused_by_name(
    either: EitherClient, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        await either.events(**options)
    assert caught.value.field == field


async def test_an_option_that_does_not_exist_is_a_type_error(either: EitherClient) -> None:
    with pytest.raises(TypeError, match="temprature"):
        await either.events("Hi", temprature=1.0)


def test_closing_the_stream_cancels_the_call(server: ScriptedServer, client: Client) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    with client.generate("Hi") as events:
        next(events)
        assert not server.inference.call_ended.is_set()
    assert server.inference.call_ended.wait(BOUND_S)


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


async def test_reading_a_closed_stream_raises_cancelled(server: ScriptedServer, client: Client) -> None:
    server.inference.script = [started(), server.inference.HOLD]
    events = client.generate("Hi")
    next(events)
    events.close()
    with pytest.raises(errors.Cancelled):
        next(events)


async def test_an_unreachable_server_is_unavailable(either: EitherClient, server: ScriptedServer) -> None:
    server.stop()
    with pytest.raises(errors.Unavailable):
        await either.events("Hi")
