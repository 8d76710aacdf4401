"""Tests that when a client leaves, its generations end and everything they held is free."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import pytest

from baton import Client
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import BODY, GatewayHere, post
from tests.support.running_pair import is_empty, wait_until

LONG: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3000,
    "extra_body": {"ignore_eos": True},
}
TOKENS = "baton_gateway_completion_tokens_total"
LIVE = b'{"status":"ok"}'
NEXT = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
LEFT = "baton_gateway_client_disconnects_total"


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_is_closed_frees_its_rows(gateway: GatewayHere, pair: Client, n: int) -> None:
    num_left, num_tokens = gateway.metric(LEFT), gateway.metric(TOKENS)
    with gateway.openai().chat.completions.create(**LONG, n=n, stream=True) as chunks:
        seen = set()
        for chunk in chunks:
            if chunk.choices[0].delta.content:
                seen.add(chunk.choices[0].index)
            if len(seen) == n:
                break
        # The first token comes from prefill, so decode may not run its row yet.
        wait_until(lambda: pair.load().rows.running == n, about=pair.load)
    wait_until(lambda: is_empty(pair.load()), about=pair.load)
    wait_until(lambda: gateway.metric(LEFT) == num_left + 1)
    assert gateway.metric(TOKENS) - num_tokens < n * LONG["max_tokens"]


async def test_an_answer_that_nobody_awaits_any_more_frees_its_row(gateway: GatewayHere, pair: Client) -> None:
    num_left, num_tokens = gateway.metric(LEFT), gateway.metric(TOKENS)
    async with gateway.openai_async() as client:
        asking = asyncio.create_task(client.chat.completions.create(**LONG))
        await asyncio.to_thread(wait_until, lambda: pair.load().rows.running == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.to_thread(wait_until, lambda: is_empty(pair.load()))
    await asyncio.to_thread(wait_until, lambda: gateway.metric(LEFT) == num_left + 1)
    assert gateway.metric(TOKENS) - num_tokens < LONG["max_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("script", ["admitted", "not admitted"])
def test_a_client_may_leave_before_there_is_anything(
    edge: GatewayHere, scripted: ScriptedServer, script: str, stream: bool
) -> None:
    hold = scripted.inference.HOLD
    scripted.inference.script = [started(), hold] if script == "admitted" else [hold]
    connection = edge.connect()
    body = json.dumps({"model": "demo", "prompt": "hi", "stream": stream})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    scripted.inference.requests.get(timeout=BOUND_S)
    connection.close()
    assert scripted.inference.call_ended.wait(BOUND_S / 2)
    wait_until(lambda: edge.metric("baton_gateway_requests_total", route="/v1/completions", status="499") == 1)
    assert edge.metric(LEFT) == 1


def begin_stream(edge: GatewayHere, scripted: ScriptedServer, *head: str) -> socket.socket:
    """Starts a streamed answer, and returns its connection once the first event has arrived. More events would
    follow.
    """
    scripted.inference.scripts.append([started(), delta([5], "first"), scripted.inference.HOLD])
    connection = socket.create_connection(("127.0.0.1", edge.port), BOUND_S)
    connection.sendall(post({**BODY, "stream": True}, *head))
    received = b""
    while b"first" not in received:
        received += connection.recv(4096)
    return connection


def test_a_client_that_has_sent_its_next_request_may_leave_too(edge: GatewayHere, scripted: ScriptedServer) -> None:
    connection = begin_stream(edge, scripted)
    connection.sendall(NEXT)
    connection.close()
    assert scripted.inference.call_ended.wait(BOUND_S / 2)
    wait_until(lambda: edge.metric(LEFT) == 1)


def test_requests_behind_an_open_one_are_answered_after_it(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), delta([5], "first"), finished()]
    with socket.create_connection(("127.0.0.1", edge.port), BOUND_S) as connection:
        connection.sendall(post(BODY) + NEXT + NEXT.replace(b"host:", b"connection: close\r\nhost:"))
        with connection.makefile("rb") as answers:
            received = answers.read()
    assert received.count(b"HTTP/1.1 200") == 3
    assert received.index(b"first") < received.index(LIVE)


def test_more_behind_an_open_request_than_a_head_may_have_ends_both(
    edge: GatewayHere, scripted: ScriptedServer
) -> None:
    with begin_stream(edge, scripted) as connection, suppress(ConnectionError):
        connection.sendall(NEXT * ((32 << 10) // len(NEXT) + 1))
        assert scripted.inference.call_ended.wait(BOUND_S / 2)
        assert LIVE not in connection.recv(4096)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_may_not_follow_the_last_request_ends_it(
    edge: GatewayHere, scripted: ScriptedServer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if stream:
        connection = begin_stream(edge, scripted, "connection: close")
    else:
        scripted.inference.script = [started(), scripted.inference.HOLD]
        connection = socket.create_connection(("127.0.0.1", edge.port), BOUND_S)
        connection.sendall(post(BODY, "connection: close"))
        scripted.inference.requests.get(timeout=BOUND_S)
    with connection, connection.makefile("rb") as answer:
        connection.sendall(b"x")
        assert (b"HTTP/1.1 400" in answer.read()) is not stream
    assert scripted.inference.call_ended.wait(BOUND_S / 2)
    wait_until(lambda: edge.metric(LEFT) == 1)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_client_that_leaves_while_it_sends_is_no_request(edge: GatewayHere, scripted: ScriptedServer) -> None:
    connection = edge.begin_body()
    wait_until(lambda: edge.metric("baton_gateway_reading_requests") == 1)
    connection.close()
    wait_until(lambda: edge.metric("baton_gateway_reading_requests") == 0)
    assert scripted.inference.requests.empty()
