"""Tests of what answers keep until their end: its bounds, and the memory that all answers share for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from baton.events import Delta, PositionLogprobs, TokenLogprob
from baton.v1 import types_pb2
from gateway.apis.chat import parse_chat
from gateway.apis.completions import parse_completion
from gateway.apis.responses import parse_response
from gateway.errors import ApiError
from gateway.generation import FREE_REPEATED_BYTES
from gateway.limits import LOGPROB_BYTES, MAX_LOGPROBS, KeptLogprobs
from gateway.open_requests import MAX_KEPT_BYTES
from gateway.plan import Plan
from tests.client.scripted_inference import ScriptedServer, delta, finished, prompt_tokens, started
from tests.gateway.gateway_here import COMPLETIONS, Answer, GatewayHere
from tests.support.running_pair import wait_until

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "demo", "prompt": [5, 6]},
    CHAT: {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]},
    RESPONSES: {"model": "demo", "input": "Hi"},
}
WITH_LOGPROBS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"logprobs": 1},
    CHAT: {"logprobs": True, "top_logprobs": 1},
    RESPONSES: {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
}


def position() -> types_pb2.PositionLogprobs:
    token = types_pb2.TokenLogprob(token_id=7, logprob=-0.5, token=b"a")
    return types_pb2.PositionLogprobs(chosen=token, top=[token])


@contextmanager
def others_keep_all(gateway: GatewayHere) -> Iterator[None]:
    """Lets two other clients have all memory. Raises ApiError unless all of it is free."""
    with ExitStack() as others:
        for client in ("one", "another"):
            others.enter_context(gateway.server.open_requests.keeping(client))(MAX_KEPT_BYTES // 2)
        yield


def nobody_keeps_any(gateway: GatewayHere) -> bool:
    with suppress(ApiError), others_keep_all(gateway):
        return True
    return False


def ask(gateway: GatewayHere, path: str, **fields: Any) -> Answer:
    return gateway.ask("POST", path, {**BODIES[path], **fields})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 1, "n": 2}, "logprobs"),
        ({"prompt_logprobs": 1, "n": 2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "logprobs"),
        ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, None),
        ({"echo": True, "logprobs": 1}, None),
        ({"logprobs": 20, "n": 2}, None),
        ({"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 1, "n": 2}, None),
    ],
)
def test_a_whole_answer_has_a_bounded_number_of_log_probabilities_of_prompts(
    edge: GatewayHere, scripted: ScriptedServer, fields: dict[str, Any], param: str | None
) -> None:
    scripted.inference.script = [started(num_prompt_tokens=MAX_LOGPROBS // 4 + 1), finished()]
    answer = ask(edge, CHAT if "messages" in fields else COMPLETIONS, max_tokens=0, **fields)
    assert (answer.status, answer.error["param"] if param else None) == (400 if param else 200, param)


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_completion, {**BODIES[COMPLETIONS], "logprobs": 20}, "logprobs"),
        (parse_completion, {**BODIES[COMPLETIONS], "best_of": 2}, "best_of"),
        (parse_chat, {**BODIES[CHAT], **WITH_LOGPROBS[CHAT]}, "top_logprobs"),
        (parse_response, {**BODIES[RESPONSES], **WITH_LOGPROBS[RESPONSES]}, "top_logprobs"),
    ],
)
def test_an_answer_has_a_bounded_number_of_log_probabilities_of_its_output(
    parse: Callable[[bytes], Plan], body: dict[str, Any], param: str
) -> None:
    held: list[int] = []
    kept = KeptLogprobs(parse(json.dumps(body).encode()), held.append)
    token = TokenLogprob(7, -0.5, b"a")
    of_four_tokens = Delta((7,) * 4, "aaaa", (PositionLogprobs(token, (token,) * 15),) * 4)
    for _ in range(MAX_LOGPROBS // 64):
        kept.add(of_four_tokens)
    assert sum(held) == MAX_LOGPROBS * LOGPROB_BYTES <= MAX_KEPT_BYTES // 2, "a client that is alone has room for it"
    with pytest.raises(ApiError) as refused:
        kept.add(of_four_tokens)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_whole_answers_share_the_memory_for_log_probabilities_of_prompts(
    edge: GatewayHere, scripted: ScriptedServer
) -> None:
    first, second = (5, b"a", None), (6, b"b", -0.5)
    scripted.inference.script = [started(), prompt_tokens(0, first, second), finished()]
    with others_keep_all(edge):
        refused = ask(edge, COMPLETIONS, max_tokens=0, prompt_logprobs=1)
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert refused.headers["retry-after"]
        assert ask(edge, COMPLETIONS, max_tokens=0).status == 200
        assert ask(edge, COMPLETIONS, max_tokens=0, echo=True, logprobs=1, stream=True).status == 200
    assert ask(edge, COMPLETIONS, max_tokens=0, prompt_logprobs=1).status == 200
    wait_until(lambda: nobody_keeps_any(edge))


@pytest.mark.parametrize("path", BODIES)
def test_whole_answers_share_it_for_those_of_their_output_too(
    edge: GatewayHere, scripted: ScriptedServer, path: str
) -> None:
    scripted.inference.script = [started(), delta([7], "a", [position()]), finished()]
    with others_keep_all(edge):
        refused = ask(edge, path, **WITH_LOGPROBS[path])
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
    assert ask(edge, path, **WITH_LOGPROBS[path]).status == 200
    wait_until(lambda: nobody_keeps_any(edge))


def test_a_stream_shares_it_if_its_last_event_has_them_all(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), delta([7], "a", [position()]), finished()]
    with others_keep_all(edge):
        for path in (COMPLETIONS, CHAT):
            assert ask(edge, path, stream=True, **WITH_LOGPROBS[path]).body.endswith(b"data: [DONE]\n\n")
        last = ask(edge, RESPONSES, stream=True, **WITH_LOGPROBS[RESPONSES]).body.decode().split("\n\n")[-2]
        assert last.startswith("event: response.failed\n") and '"code":"rate_limit_exceeded"' in last
    last = ask(edge, RESPONSES, stream=True, **WITH_LOGPROBS[RESPONSES]).body.decode().split("\n\n")[-2]
    assert last.startswith("event: response.incomplete\n")
    wait_until(lambda: nobody_keeps_any(edge))


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_large_tools_that_a_response_repeats_share_it(
    edge: GatewayHere, scripted: ScriptedServer, is_streamed: bool
) -> None:
    scripted.inference.script = [started(), delta([7], "a"), finished()]
    small = {"type": "function", "name": "look_up", "description": "a" * (FREE_REPEATED_BYTES // 2)}
    large = {**small, "description": "a" * FREE_REPEATED_BYTES}
    with others_keep_all(edge):
        for choice in ("auto", "none"):  # with "none" they are not in the prompt
            refused = ask(edge, RESPONSES, tools=[large], tool_choice=choice, stream=is_streamed)
            assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert ask(edge, RESPONSES, tools=[small], stream=is_streamed).status == 200
    assert ask(edge, RESPONSES, tools=[large], stream=is_streamed).status == 200
    wait_until(lambda: nobody_keeps_any(edge))
