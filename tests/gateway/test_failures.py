"""Tests of the decode service's failures as an HTTP client sees them: the status, the code, and whether to retry."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest
from google.rpc import code_pb2
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from baton.v1 import types_pb2
from gateway import main
from gateway.apis.completions import TextChoice
from gateway.edge import HttpEdge
from gateway.request_record import GatewayMetrics
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, failure, finished, started
from tests.gateway.gateway_here import BODY, COMPLETIONS, GatewayHere, gateway_here
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until

STREAMED = {**BODY, "stream": True}
FULL = failure(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL")


@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("status", "expected", "kind", "code", "retry_after"),
    [
        (failure(code_pb2.INVALID_ARGUMENT, "bad"), 400, "invalid_request_error", None, None),
        (FULL, 429, "rate_limit_error", "overloaded", "1"),
        (
            failure(code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after_s="90"),
            429,
            "rate_limit_error",
            "overloaded",
            "90",
        ),
        (failure(code_pb2.RESOURCE_EXHAUSTED, "message too large"), 413, None, "request_too_large", None),
        (failure(code_pb2.DEADLINE_EXCEEDED, "late"), 504, "server_error", "deadline_exceeded", None),
        (failure(code_pb2.UNAVAILABLE, "no", reason="NO_PREFILL"), 503, "server_error", "unavailable", "1"),
        (failure(code_pb2.FAILED_PRECONDITION, "differ"), 503, "server_error", "services_disagree", None),
        (failure(code_pb2.INTERNAL, "broke"), 500, "server_error", "internal_error", None),
        (failure(code_pb2.UNAUTHENTICATED, "token"), 502, "server_error", "bad_gateway", None),
        (failure(code_pb2.UNIMPLEMENTED, "what"), 502, "server_error", "bad_gateway", None),
    ],
    ids=lambda value: str(value)[:12].strip() if isinstance(value, int) else "",
)
def test_a_request_that_is_not_admitted(
    loop: LoopThread,
    scripted: ScriptedServer,
    body: Any,
    status: Any,
    expected: int,
    kind: str | None,
    code: str | None,
    retry_after: str | None,
) -> None:
    scripted.inference.script = [status]
    admission_timeout_s = 1.0 if status.code == code_pb2.UNAVAILABLE else BOUND_S  # it tries for as long
    with gateway_here(loop, scripted.address, admission_timeout_s=admission_timeout_s) as gateway:
        answer = gateway.ask("POST", COMPLETIONS, body)
    assert answer.status == expected
    assert answer.error["type"] == (kind or "invalid_request_error")
    assert (answer.error["code"], answer.headers.get("retry-after")) == (code, retry_after)


def test_a_context_whose_length_is_not_told_is_exceeded_in_openais_words_too(
    edge: GatewayHere, scripted: ScriptedServer
) -> None:
    scripted.inference.script = [
        failure(code_pb2.INVALID_ARGUMENT, "prompt: is long", reason="CONTEXT_EXCEEDED", field="prompt")
    ]
    error = edge.ask("POST", COMPLETIONS, BODY).error
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error["message"] == "This model's maximum context length is exceeded: is long (context_length_exceeded)"


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_answer_that_fails_before_its_end_is_no_answer(
    edge: GatewayHere, scripted: ScriptedServer, where: str
) -> None:
    output = [delta([5], "a")] if where == "after" else []
    scripted.inference.script = [started(), *output, failure(code_pb2.INTERNAL, "broke")]
    answer = edge.ask("POST", COMPLETIONS, BODY)
    assert (answer.status, answer.error["message"]) == (500, "broke")


def test_a_stream_that_fails_ends_with_the_error_and_without_done(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), delta([5], "a"), failure(code_pb2.INTERNAL, "broke")]
    answer = edge.ask("POST", COMPLETIONS, STREAMED)
    part, error = answer.events
    assert (answer.status, part["choices"][0]["text"]) == (200, "a")
    assert error["error"] == {"message": "broke", "type": "server_error", "param": None, "code": "internal_error"}
    wait_until(lambda: edge.metric("baton_gateway_requests_total", route=COMPLETIONS, status="500") == 1)


def test_a_mistake_of_ours_in_a_stream_is_its_last_event(
    edge: GatewayHere, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("a mistake")

    scripted.inference.script = [started(), delta([5], "a"), scripted.inference.HOLD]
    monkeypatch.setattr(TextChoice, "part", crash)
    answer = edge.ask("POST", COMPLETIONS, STREAMED)
    (error,) = answer.events
    assert (answer.status, error["error"]["code"]) == (200, "internal_error")
    assert scripted.inference.call_ended.wait(BOUND_S)
    wait_until(lambda: edge.metric("baton_gateway_requests_total", route=COMPLETIONS, status="500") == 1)


@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "streamed"])
def test_a_log_probability_that_is_no_number_is_the_least(
    edge: GatewayHere, scripted: ScriptedServer, body: Any
) -> None:
    position = types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=5, logprob=math.nan, token=b"a"),
        top=[types_pb2.TokenLogprob(token_id=6, logprob=-math.inf, token=b"b")],
    )
    scripted.inference.script = [started(), delta([5], "a", [position]), finished()]
    answer = edge.ask("POST", COMPLETIONS, {**body, "logprobs": 1})
    first = answer.json if body is BODY else answer.events[0]
    assert first["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    assert first["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]


async def test_an_answer_that_crashes_after_its_head_is_counted_as_a_crash() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("a mistake")

    async def nothing(*_: object) -> Any:
        return None

    registry = CollectorRegistry()
    edge = HttpEdge(app, metrics=GatewayMetrics(registry))
    with pytest.raises(RuntimeError):
        await edge({"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}, nothing, nothing)
    labels = {"route": COMPLETIONS, "status": "500"}
    assert registry.get_sample_value("baton_gateway_requests_total", labels) == 1


def test_what_ends_lines_ends_no_event(edge: GatewayHere, scripted: ScriptedServer) -> None:
    """Clients split a stream into lines as their language does, so characters that end a line in any language must be
    escaped.
    """
    text = "a\u2028b\u2029c\x85d\r\n\x0be"
    scripted.inference.script = [started(), delta([5], text), finished()]
    lines = [each for each in edge.ask("POST", COMPLETIONS, STREAMED).body.decode().splitlines() if each]
    assert all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == text


def test_the_package_raises_the_error_of_a_stream(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), delta([5], "a"), failure(code_pb2.INTERNAL, "broke")]
    chunks = iter(edge.openai().completions.create(**STREAMED))
    assert next(chunks).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="broke") as caught:
        next(chunks)
    assert caught.value.code == "internal_error"


@pytest.mark.parametrize("body", [BODY, STREAMED], ids=["whole", "streamed"])
def test_the_first_choice_that_fails_ends_the_others(edge: GatewayHere, scripted: ScriptedServer, body: Any) -> None:
    hold = scripted.inference.HOLD
    scripted.inference.scripts.extend([[started(), hold], [started(), failure(code_pb2.INTERNAL, "broke")]])
    answer = edge.ask("POST", COMPLETIONS, {**body, "n": 2})
    assert b'"broke"' in answer.body
    for _ in range(2):
        scripted.inference.ended_calls.get(timeout=BOUND_S / 2)
    wait_until(lambda: edge.metric("baton_gateway_open_requests") == 0)


def test_a_choice_that_is_refused_refuses_the_request(edge: GatewayHere, scripted: ScriptedServer) -> None:
    hold = scripted.inference.HOLD
    scripted.inference.scripts.extend([[started(), hold], [FULL]])
    assert edge.ask("POST", COMPLETIONS, {**STREAMED, "n": 2}).status == 429


def test_the_package_tries_again_where_it_was_full(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.scripts.extend([[FULL], [started(), delta([5], "a"), finished()]])
    answer = edge.openai(max_retries=1).completions.create(**BODY)
    assert answer.choices[0].text == "a"


def test_a_request_has_its_time_and_no_more(loop: LoopThread, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), scripted.inference.HOLD]
    for request_timeout_s in (0.3, 3.0, 30.0):  # on a busy machine, the first may pass before the request is sent
        with gateway_here(loop, scripted.address, request_timeout_s=request_timeout_s) as gateway:
            assert gateway.ask("GET", "/v1/models").status == 200  # it is connected
            answer = gateway.ask("POST", COMPLETIONS, BODY)
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
            if not scripted.inference.requests.empty():
                break
    assert scripted.inference.call_ended.wait(BOUND_S)


def test_without_a_decode_service_there_is_a_reason_at_once(loop: LoopThread) -> None:
    with gateway_here(loop, "127.0.0.1:1") as gateway:
        for answer in (gateway.ask("POST", COMPLETIONS, BODY), gateway.ask("GET", "/v1/models")):
            assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "unavailable", "1")
            assert answer.error["message"].startswith("the decode service cannot be reached: nothing listens at 127.0")


def test_a_decode_service_that_is_gone_is_told_within_the_time_to_admit(
    loop: LoopThread, scripted: ScriptedServer
) -> None:
    with gateway_here(loop, scripted.address, admission_timeout_s=2.0) as gateway:
        scripted.inference.script = [started(), finished()]
        wait_until(lambda: gateway.ask("POST", COMPLETIONS, BODY).status == 200)
        scripted.stop()
        answer = gateway.ask("POST", COMPLETIONS, BODY)
    assert (answer.status, answer.error["code"]) == (503, "unavailable")


def test_a_stream_whose_decode_service_dies_goes_on_in_another(loop: LoopThread) -> None:
    servers = [ScriptedServer(), ScriptedServer()]
    try:
        for server in servers:
            server.become_ready()
            server.inference.script = [started(), delta([5], "a"), server.inference.HOLD]
        with gateway_here(loop, *(server.address for server in servers)) as gateway:
            chunks = iter(gateway.openai().completions.create(**STREAMED))
            assert next(chunks).choices[0].text == "a"
            dying, other = sorted(servers, key=lambda server: server.inference.requests.empty())
            other.inference.script = [started(), delta([6], "b"), finished(num_completion_tokens=2)]
            dying.stop()
            assert [chunk.choices[0].text for chunk in chunks] == ["b", ""]
            assert list(other.inference.requests.get(timeout=BOUND_S).generated_token_ids) == [5]
    finally:
        for server in servers:
            server.stop()


def test_a_body_that_still_comes_when_the_gateway_stops_is_told(loop: LoopThread, scripted: ScriptedServer) -> None:
    limits = {"body_timeout_s": BOUND_S / 2}
    with gateway_here(loop, scripted.address, grace_period_s=0.1, limits=limits) as gateway:
        connection = gateway.begin_body()
        wait_until(lambda: gateway.metric("baton_gateway_reading_requests") == 1)
        loop.run(gateway.server.drain())
        response = connection.getresponse()
        assert (response.status, b'"stopping"' in response.read()) == (503, True)
        connection.close()


def test_a_decode_service_that_does_not_tokenise_in_time_is_unavailable(
    loop: LoopThread, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "RPC_TIMEOUT_S", 2.0)
    scripted.inference.tokenizing_s = BOUND_S
    with gateway_here(loop, scripted.address, admission_timeout_s=2.0) as here:
        answer = here.ask("POST", "/tokenize", {"prompt": "a"})
    assert (answer.status, answer.error["code"]) == (503, "unavailable")
    assert "has not answered in time" in answer.error["message"]
