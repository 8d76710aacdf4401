"""Tests that a request with too large prompts is refused before anything is built from them, and that its choices start
one by one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.apis.chat import parse_chat
from gateway.apis.completions import parse_completion
from gateway.conversation import MAX_MESSAGES
from gateway.errors import ApiError
from gateway.generation import Choices
from gateway.limits import MAX_SENT_BYTES
from tests.client.scripted_inference import ScriptedServer, finished, started
from tests.gateway.gateway_here import GatewayHere

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 8192
"""The context length in tokens of the scripted decode service, which accepts every prompt."""


@pytest.fixture(autouse=True)
def answers(scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), finished()]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([1] * CONTEXT, "prompt"), ([[1], [1] * CONTEXT], "prompt[1]")],
    ids=["one", "second of a list"],
)
def test_more_token_ids_than_the_context_go_no_further(
    edge: GatewayHere, scripted: ScriptedServer, prompt: Any, param: str
) -> None:
    answer = edge.ask("POST", COMPLETIONS, {"model": "demo", "prompt": prompt, "n": 2})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "context_length_exceeded")
    assert scripted.inference.requests.empty()


def test_as_many_as_leave_room_do(edge: GatewayHere) -> None:
    assert edge.ask("POST", COMPLETIONS, {"model": "demo", "prompt": [1] * (CONTEXT - 1)}).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_counts_as_often_as_it_is_sent(edge: GatewayHere, scripted: ScriptedServer, path: str) -> None:
    text = "ä" * (MAX_SENT_BYTES // 2 // 32 + 1)
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    answer = edge.ask("POST", path, {"model": "demo", **body, "n": 32})
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert scripted.inference.requests.empty()
    assert edge.ask("POST", path, {"model": "demo", **body}).status == 200


def test_messages_are_counted_before_any_is_looked_at() -> None:
    message = b'{"role": "robot"}'
    for num_messages, param in ((MAX_MESSAGES + 1, "messages"), (MAX_MESSAGES, "messages[0].role")):
        with pytest.raises(ApiError) as refused:
            parse_chat(b'{"model": "demo", "messages": [' + b",".join([message] * num_messages) + b"]}")
        assert refused.value.param == param


async def test_others_have_their_turn_between_two_choices() -> None:
    opened: list[int] = []
    seen: list[int] = []

    class Stream:
        async def aclose(self) -> None: ...

        async def __anext__(self) -> Any:
            await asyncio.Event().wait()

    def open_stream(index: int) -> Any:
        opened.append(index)
        return Stream()

    async def other() -> None:
        while len(opened) < 4:
            seen.append(len(opened))
            await asyncio.sleep(0)

    plan = parse_completion(b'{"model": "m", "prompt": "x", "n": 4}')
    watching = asyncio.create_task(other())
    async with asyncio.timeout(10), Choices(plan, open_stream):
        await watching
    assert set(seen) >= {1, 2, 3}
