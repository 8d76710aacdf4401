"""Tests of the limits on the resources of one HTTP client, and of the API keys that admit clients."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import itertools
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from common.config.settings import GatewaySettings
from gateway.errors import ApiError
from gateway.limits import HttpLimits
from gateway.open_requests import FREE_BODY_BYTES, OpenRequests
from gateway.post_endpoint import PostEndpoint
from gateway.request_record import GatewayMetrics, HttpRecord
from gateway.served_model import ServedModel
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.answers import USER
from tests.gateway.gateway_here import BODY, COMPLETIONS, GatewayHere, gateway_here, key_file, post
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until

LEFT = "baton_gateway_client_disconnects_total"
SHORT_S = 1.0
"""A time-out in seconds of what does not come."""
LONG_S = 600.0
"""A time-out in seconds that no test reaches, unless it skips the event loop's time."""
SMALLEST = 64 << 10
MOST_HELD_BYTES = 16 << 20
"""The most bytes that are held for a client that reads nothing. Most of them are in its sockets' buffers."""


def test_more_open_requests_than_allowed_are_told_when_to_come_again(
    loop: LoopThread, scripted: ScriptedServer
) -> None:
    scripted.inference.scripts.append([started(), delta([1], "a"), scripted.inference.HOLD])
    scripted.inference.script = [started(), delta([2], "b"), finished()]
    with gateway_here(loop, scripted.address, max_open_requests=1) as gateway:
        first = gateway.openai().completions.create(**BODY, stream=True)
        assert next(first).choices[0].text == "a"
        refused = gateway.ask("POST", COMPLETIONS, BODY)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "overloaded", "1")
        assert refused.error["type"] == "rate_limit_error"
        assert gateway.ask("GET", "/v1/models").status == 200
        first.close()
        wait_until(lambda: gateway.ask("POST", COMPLETIONS, BODY).status == 200)


def test_a_body_that_is_too_large_is_refused_by_its_length(loop: LoopThread, scripted: ScriptedServer) -> None:
    with gateway_here(loop, scripted.address, max_request_bytes=SMALLEST) as gateway:
        connection = gateway.begin_body(b"", num_bytes=1 << 40)
        assert connection.getresponse().status == 413
        connection.close()


def test_a_body_that_does_not_tell_its_length_is_counted(loop: LoopThread, scripted: ScriptedServer) -> None:
    sent = itertools.count()

    def endless() -> Iterator[bytes]:
        while next(sent) < 10_000:
            yield b" " * 4096

    limits = {"head_timeout_s": LONG_S}  # for as long the body is read after the answer
    with gateway_here(loop, scripted.address, max_request_bytes=SMALLEST, limits=limits) as gateway:
        connection = gateway.connect()
        connection.request("POST", COMPLETIONS, endless(), {"content-type": "application/json"})
        response = connection.getresponse()
        assert (response.status, b"request_too_large" in response.read()) == (413, True)
        connection.close()
        fits = gateway.ask("POST", COMPLETIONS, {**BODY, "prompt": "a" * (SMALLEST - 100)})
        assert fits.status != 413


@pytest.mark.parametrize(
    ("line", "head", "status"),
    [
        (f"POST {COMPLETIONS} HTTP/1.1", ["content-type: application/json", "connection: close"], 413),
        (f"POST {COMPLETIONS} HTTP/1.0", ["content-type: application/json"], 413),
        (f"POST {COMPLETIONS} HTTP/1.1", ["content-type: text/plain", "connection: close"], 415),
        (f"POST {COMPLETIONS} HTTP/1.1", ["x-request-id: " + "a" * 300, "connection: close"], 400),
        ("POST /nowhere HTTP/1.1", ["connection: close"], 404),
        (f"POST {COMPLETIONS} HTTP/1.1", ["transfer-encoding: chunked"], 400),
    ],
)
def test_who_sends_a_whole_body_before_it_reads_gets_the_answer(
    loop: LoopThread, scripted: ScriptedServer, line: str, head: list[str], status: int
) -> None:
    num_bytes = 32 << 20
    with gateway_here(loop, scripted.address, max_request_bytes=SMALLEST) as gateway, socket.socket() as connection:
        connection.settimeout(BOUND_S)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(
            "\r\n".join([line, "host: localhost", *head, f"content-length: {num_bytes}", "", ""]).encode()
        )
        connection.sendall(bytes(num_bytes))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b'{"error":' in answer


def test_who_leaves_with_the_answer_while_its_body_is_on_the_way_is_no_failure(
    loop: LoopThread, scripted: ScriptedServer
) -> None:
    head = b"POST /nowhere HTTP/1.0\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
    with gateway_here(loop, scripted.address) as gateway:
        for _ in range(40):  # most of them leave before the gateway closes its side
            with socket.create_connection(("127.0.0.1", gateway.port), BOUND_S) as connection:
                connection.sendall(head + bytes(1_000_000))
                assert connection.recv(4096).startswith(b"HTTP/1.1 404 ")
        wait_until(lambda: gateway.metric("baton_gateway_requests_total", route="other", status="404") == 40)


def assert_ends_as_time_passes(loop: LoopThread, connection: socket.socket) -> None:
    """Skips the gateway's time until it has ended or aborted the connection. Nothing may come on it."""
    connection.setblocking(False)

    def has_ended() -> bool:
        loop.skip(LONG_S / 4)
        try:
            assert connection.recv(4096) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True

    wait_until(has_ended)


def send_until_cut_off(loop: LoopThread, connection: socket.socket) -> None:
    """Sends until the gateway has aborted the connection. The gateway's time passes meanwhile."""
    with pytest.raises(ConnectionError):
        while True:
            connection.send(bytes(65536))
            loop.skip(LONG_S / 8)


def test_who_sends_on_after_the_answer_is_cut_off(own_loop: LoopThread, scripted: ScriptedServer) -> None:
    limits = {"head_timeout_s": LONG_S}
    with gateway_here(own_loop, scripted.address, max_request_bytes=SMALLEST, limits=limits) as gateway:
        connection = gateway.connect()
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("connection", "close")
        connection.putheader("content-length", str(1 << 40))
        connection.endheaders()
        assert connection.sock.recv(4096).startswith(b"HTTP/1.1 41")
        send_until_cut_off(own_loop, connection.sock)
        connection.close()
        with socket.create_connection(("127.0.0.1", gateway.port), BOUND_S) as damaged:
            head = post(BODY, "transfer-encoding: chunked").partition(b"content-length")[0]
            damaged.sendall(head + b"\r\n1\r\n{\r\n")
            wait_until(lambda: gateway.metric("baton_gateway_reading_requests") == 1)
            damaged.sendall(b"zz\r\n")
            assert damaged.makefile("rb").read().startswith(b"HTTP/1.1 400")
            send_until_cut_off(own_loop, damaged)


def test_a_body_that_does_not_come_is_given_up(loop: LoopThread, scripted: ScriptedServer) -> None:
    with gateway_here(loop, scripted.address, limits={"body_timeout_s": SHORT_S}) as gateway:
        connection = gateway.begin_body()
        response = connection.getresponse()
        assert (response.status, b"request_timeout" in response.read()) == (408, True)
        connection.close()


def send_half_a_body(gateway: GatewayHere, stack: ExitStack) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), BOUND_S))
    connection.sendall(post(BODY)[:-1])
    return connection


def test_bodies_that_do_not_come_leave_the_places_to_others(loop: LoopThread, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), delta([1], "a"), finished()]
    with gateway_here(loop, scripted.address, max_open_requests=3) as gateway, ExitStack() as stack:
        for _ in range(5):
            send_half_a_body(gateway, stack)
        wait_until(lambda: gateway.metric("baton_gateway_reading_requests") == 5)
        assert [gateway.ask("POST", COMPLETIONS, BODY).status for _ in range(2)] == [200] * 2


def test_a_body_that_comes_too_slowly_is_given_up(loop: LoopThread, scripted: ScriptedServer) -> None:
    with (
        gateway_here(loop, scripted.address, limits={"body_grace_s": 0.0, "body_window_s": SHORT_S}) as gateway,
        ExitStack() as stack,
    ):
        answer = http.client.HTTPResponse(send_half_a_body(gateway, stack))
        answer.begin()
        assert (answer.status, b"request_timeout" in answer.read()) == (408, True)


class KeepsBodies(PostEndpoint):
    """An endpoint that keeps the bodies that it reads."""

    def __init__(self, limits: HttpLimits) -> None:
        super().__init__(
            served_model=cast(ServedModel, None),  # not asked
            open_requests=OpenRequests(max_open=1, max_reading_bytes=1 << 20),
            metrics=GatewayMetrics(CollectorRegistry()),
            limits=limits,
        )
        self.bodies: list[bytes] = []

    async def _answer(self, body: bytes, *_: object) -> None:
        self.bodies.append(body)


@pytest.mark.parametrize(("pause", "is_read"), [(1 / 3, True), (0.9, False)], ids=["fast enough", "too slow"])
async def test_a_body_that_comes_fast_enough_may_take_longer(
    monkeypatch: pytest.MonkeyPatch, pause: float, is_read: bool
) -> None:
    """The parts, of five bytes, come in pauses of a part of the window, in which six bytes must come."""
    loop, window_s, sent = asyncio.get_running_loop(), 1.5, json.dumps(BODY).encode()
    began_s = now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    parts = iter([sent[place : place + 5] for place in range(0, len(sent), 5)])
    answers: list[Message] = []

    async def receive() -> Message:
        nonlocal now_s
        now_s += pause * window_s
        for _ in range(3):  # timers run in the turn after the one in which they are due
            await asyncio.sleep(0)
        part = next(parts, b"")
        return {"type": "http.request", "body": part, "more_body": part != b""}

    async def send(message: Message) -> None:
        answers.append(message)

    limits = HttpLimits.of(GatewaySettings())
    limits = dataclasses.replace(limits, body_grace_s=0.0, body_window_s=window_s, min_body_rate=4)
    endpoint = KeepsBodies(limits)
    record = HttpRecord(route=COMPLETIONS, is_messages_api=False, client="a")
    headers = [(b"content-type", b"application/json")]
    await endpoint({"type": "http", "headers": headers, "state": {"record": record}}, receive, send)
    if is_read:
        assert (endpoint.bodies, answers) == ([sent], [])
        assert now_s - began_s > 1.5 * window_s
    else:
        assert (endpoint.bodies, answers[0]["status"]) == ([], 408)


def test_a_small_body_that_stalls_once_is_waited_for(loop: LoopThread, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), delta([1], "a"), finished()]
    limits = {"body_window_s": 0.1}
    with gateway_here(loop, scripted.address, limits=limits) as gateway, ExitStack() as stack:
        connection = send_half_a_body(gateway, stack)
        time.sleep(0.3)
        connection.sendall(post(BODY)[-1:])
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200


@pytest.mark.parametrize("other", ["key", "address"])
def test_a_client_that_has_all_places_keeps_no_other_out(
    loop: LoopThread, scripted: ScriptedServer, tmp_path: Path, other: str
) -> None:
    scripted.inference.scripts.append([started(), delta([1], "a"), scripted.inference.HOLD])
    scripted.inference.script = [started(), delta([2], "b"), finished()]
    settings = {"api_key_file": key_file(tmp_path, "first-key", "second-key")} if other == "key" else {}
    with gateway_here(loop, scripted.address, max_open_requests=1, **settings) as gateway:
        first = gateway.openai(api_key="first-key").completions.create(**BODY, stream=True)
        assert next(first).choices[0].text == "a"
        assert gateway.ask("POST", COMPLETIONS, BODY, authorization="Bearer first-key").status == 429
        source = ("127.0.0.2", 0) if other == "address" else None
        shown = "first-key" if other == "address" else "second-key"
        answer = gateway.ask("POST", COMPLETIONS, BODY, source=source, authorization=f"Bearer {shown}")
        assert answer.status == 200
        first.close()


def test_large_bodies_on_their_way_are_bounded_of_each_client_and_in_all() -> None:
    requests = OpenRequests(max_open=1, max_reading_bytes=100)
    with requests.reading("a") as first, requests.reading("a") as second, requests.reading("b") as third:
        first(FREE_BODY_BYTES + 50)
        second(FREE_BODY_BYTES)
        with pytest.raises(ApiError, match="too many large bodies"):
            second(FREE_BODY_BYTES + 1)
        third(FREE_BODY_BYTES + 50)
    with requests.reading("c") as fourth:
        fourth(FREE_BODY_BYTES + 50)


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"], ids=["nothing", "half a head"]
)
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
def test_a_head_that_does_not_come_costs_the_connection(
    own_loop: LoopThread, scripted: ScriptedServer, begun: bytes, is_second: bool
) -> None:
    limits = {"head_timeout_s": LONG_S, "keep_alive_s": int(LONG_S)}
    with (
        gateway_here(own_loop, scripted.address, limits=limits) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), BOUND_S) as connection,
    ):
        if is_second:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert b"ok" in answer.read()
        connection.sendall(begun)
        assert_ends_as_time_passes(own_loop, connection)


def test_a_head_that_is_too_large_is_refused(edge: GatewayHere) -> None:
    assert edge.ask("GET", "/health/live", x_large="a" * 10_000).status == 200
    refused = edge.send_raw(b"GET /health/live HTTP/1.1\r\nx-large: ".ljust((32 << 10) + 1, b"a"))
    assert (refused.status, refused.headers["connection"]) == (400, "close")
    assert refused.error["type"] == "invalid_request_error"


def test_a_reader_that_takes_nothing_stops_its_generation_and_is_dropped(
    loop: LoopThread, scripted: ScriptedServer
) -> None:
    num_written, size, total = itertools.count(), 1 << 15, 4000
    written = [0]

    def much() -> Iterator[Any]:
        yield started()
        for written[0] in itertools.islice(num_written, total):
            yield delta([1], "a" * size)
        yield finished()

    scripted.inference.scripts.append(much())  # type: ignore[arg-type]  # read once
    with (
        gateway_here(loop, scripted.address, client_stall_timeout_s=1.0) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), BOUND_S) as reader,
    ):
        reader.sendall(post({**BODY, "stream": True}))
        assert scripted.inference.call_ended.wait(BOUND_S)
        assert written[0] * size < MOST_HELD_BYTES, "the gateway went on reading for nobody"
        wait_until(lambda: gateway.metric(LEFT) == 1)


def test_a_reader_that_takes_nothing_of_a_whole_answer_has_left(loop: LoopThread, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), *[delta([1], "a" * (1 << 20))] * 12, finished()]
    with (
        gateway_here(loop, scripted.address, client_stall_timeout_s=SHORT_S) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), BOUND_S) as reader,
    ):
        reader.sendall(post(BODY))
        wait_until(lambda: gateway.metric("baton_gateway_requests_total", route=COMPLETIONS, status="499") == 1)
        assert gateway.metric(LEFT) == 1


@pytest.fixture
def locked(loop: LoopThread, scripted: ScriptedServer, tmp_path: Path) -> Iterator[GatewayHere]:
    """A gateway that accepts two keys."""
    keys = key_file(tmp_path, "first-key", "", "second-key")
    scripted.inference.script = [started(), delta([1], "a"), finished()]
    scripted.become_ready()
    with gateway_here(loop, scripted.address, api_key_file=keys) as gateway:
        yield gateway


def test_the_decode_service_is_told_whose_key_it_was(locked: GatewayHere, scripted: ScriptedServer) -> None:
    for key in ("first-key", "second-key"):
        locked.openai(api_key=key).completions.create(**BODY)
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/tokenize", {"messages": USER}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/messages/count_tokens", {"model": "demo", "messages": USER}),
        ):
            assert locked.ask("POST", path, body, authorization=f"Bearer {key}").status == 200
    for calls, num_of_each in ((scripted.inference.requests, 1), (scripted.inference.texts, 4)):
        tenants = [calls.get(timeout=BOUND_S).tenant for _ in range(2 * num_of_each)]
        assert tenants == ["key 0"] * num_of_each + ["key 1"] * num_of_each


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_each_key_opens_everything(locked: GatewayHere, key: str) -> None:
    client = locked.openai(api_key=key)
    assert client.completions.create(**BODY).choices[0].text == "a"
    assert [model.id for model in client.models.list()] == ["demo"]


@pytest.mark.parametrize("key", ["first-ke", "first-key2", "x", "first-key,second-key"])
def test_another_key_opens_nothing(locked: GatewayHere, scripted: ScriptedServer, key: str) -> None:
    client = locked.openai(api_key=key)
    with pytest.raises(openai.AuthenticationError) as caught:
        client.completions.create(**BODY)
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert scripted.inference.requests.empty()


@pytest.mark.parametrize("other", [b"first-key", b"second-key", b"x"])
def test_two_keys_at_a_time_open_nothing(locked: GatewayHere, other: bytes) -> None:
    answer = locked.send_raw(
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"authorization: Bearer first-key\r\nauthorization: Bearer " + other + b"\r\n\r\n"
    )
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert "more than one API key" in answer.error["message"]


@pytest.mark.parametrize("shown", [{}, {"authorization": "Basic first-key"}, {"authorization": "first-key"}])
def test_no_key_opens_nothing_but_what_needs_none(locked: GatewayHere, shown: dict[str, str]) -> None:
    for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = locked.ask("POST", path, BODY, **shown)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.error["type"] == "invalid_request_error"
    for path in ("/v1/models", "/v1/models/demo", "/v1/nope"):
        assert locked.ask("GET", path, **shown).status == 401
    for path in ("/health", "/health/live", "/metrics"):
        assert locked.ask("GET", path, **shown).status == 200
