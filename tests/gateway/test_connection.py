"""Tests of how the gateway writes answers, and of how long it waits for a client that does not read."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.testing import capture_logs
from uvicorn.server import ServerState

import gateway.main
from common.config.settings import GatewaySettings
from gateway.connection import bounded_connections
from gateway.limits import HttpLimits
from gateway.listener import BoundedListener, ConnectionRoom, OpenConnections
from gateway.sending import SLICE_BYTES, EventStreamWriter, JsonResponse, ServerEvent
from tests.client.scripted_inference import ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import BODY, Answer, GatewayHere, gateway_here, post
from tests.security.certificates import Authority
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until

BOUND_S = 10.0
LONG_S = 600.0
"""A time-out in seconds that no test reaches, unless it skips the event loop's time."""
SMALL_BUFFER = 4096


@dataclass(frozen=True, slots=True)
class Serving:
    port: int
    state: ServerState

    @property
    def num_untaken(self) -> list[int]:
        """For each open connection, the bytes that the client has not yet taken."""
        return [connection.transport.get_write_buffer_size() for connection in tuple(self.state.connections)]

    def ask(self, *head: bytes, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(BOUND_S)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(b"\r\n".join([b"GET / HTTP/1.1", b"host: localhost", *head, b"", b""]))
        return connection


def answering(num_bytes: int) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(num_bytes).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"a" * num_bytes})

    return app


@contextmanager
def serving(
    loop: LoopThread, app: ASGIApp, *, stall_timeout_s: float = LONG_S, send_buffer: int | None = SMALL_BUFFER
) -> Iterator[Serving]:
    """Serves an application on loopback. `send_buffer` is the socket's send buffer in bytes; None leaves it to the
    system.
    """
    limits = HttpLimits.of(GatewaySettings(client_stall_timeout_s=stall_timeout_s))
    protocol, state = bounded_connections(limits, OpenConnections(max_connections=1 << 20)), ServerState()
    config = uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=int(10 * LONG_S)
    )
    config.load()
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)

    async def listen() -> asyncio.Server:
        running = asyncio.get_running_loop()
        return await running.create_server(
            lambda: protocol(config=config, server_state=state, app_state={}), sock=listener
        )

    async def stop() -> None:
        server.close()
        for connection in tuple(state.connections):
            connection.transport.abort()
        await server.wait_closed()

    server = loop.run(listen())
    try:
        yield Serving(listener.getsockname()[1], state)
    finally:
        loop.run(stop())


def receive(
    connection: socket.socket, *, until_bytes: int = 1 << 30, pause: Callable[[], object] = lambda: None
) -> int:
    """Reads at least `until_bytes` bytes, calls `pause` after each read, and returns how many came."""
    num_bytes = 0
    while num_bytes < until_bytes and (data := connection.recv(64 << 10)):
        num_bytes += len(data)
        pause()
    return num_bytes


def test_a_slow_reader_gets_everything(own_loop: LoopThread) -> None:
    """Reading the whole answer takes longer than the stall time-out, but no single pause does."""
    answer_bytes, passed_s = 2 << 20, 0.0

    def pause() -> None:
        nonlocal passed_s
        passed_s += LONG_S / 15
        own_loop.skip(LONG_S / 15)

    with (
        serving(own_loop, answering(answer_bytes)) as here,
        here.ask(b"connection: close", receive_buffer=64 << 10) as reader,
    ):
        assert receive(reader, pause=pause) > answer_bytes
        assert passed_s > 2 * LONG_S, "it was not slow"


def test_a_reader_that_has_taken_everything_is_waited_for(own_loop: LoopThread) -> None:
    answer_bytes = 1 << 20
    with serving(own_loop, answering(answer_bytes)) as here, here.ask() as reader:
        receive(reader, until_bytes=answer_bytes)
        wait_until(lambda: here.num_untaken == [0])
        for _ in range(3):
            own_loop.skip(LONG_S)
        assert here.num_untaken == [0]
        reader.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert receive(reader) > answer_bytes


def wait_until_dropped(loop: LoopThread, here: Serving) -> None:
    """Skips time until the server has dropped its connection."""

    def is_dropped() -> bool:
        loop.skip(LONG_S)
        return here.num_untaken == []

    wait_until(is_dropped)


@pytest.mark.parametrize("ending", ["close", "keep-alive", "malformed"])
def test_nobody_is_waited_for_who_takes_nothing_of_the_little_that_is_left(own_loop: LoopThread, ending: str) -> None:
    """The rest of the answer is too small for asyncio to pause writing. The connection is to be closed or kept open
    after it.
    """
    head = [b"connection: close"] if ending == "close" else []
    with (
        serving(own_loop, answering(60_000)) as here,
        here.ask(*head, receive_buffer=SMALL_BUFFER) as reader,
    ):
        wait_until(lambda: here.num_untaken != [] and 0 < here.num_untaken[0] < 64 << 10)
        (connection,) = here.state.connections
        if ending == "malformed":
            assert not connection.transport.is_closing()
            reader.sendall(b"what\r\n\r\n")
        wait_until(lambda: connection.transport.is_closing() == (ending != "keep-alive"))
        wait_until_dropped(own_loop, here)


def test_the_system_holds_little_for_a_reader_of_nothing(own_loop: LoopThread) -> None:
    """A small send buffer lets the gateway notice soon what the client has read."""
    answer_bytes, num_same = 8 << 20, 20
    with (
        serving(own_loop, answering(answer_bytes), send_buffer=None) as here,
        here.ask(receive_buffer=64 << 10),
    ):
        seen: list[int] = []

        def has_settled() -> bool:
            seen.extend(here.num_untaken)
            return len(seen) > num_same and 0 < seen[-1] == seen[-num_same]

        wait_until(has_settled)
        assert seen[-1] > answer_bytes - (1 << 20)
        wait_until_dropped(own_loop, here)


def test_an_answer_that_comes_while_its_connection_closes_is_no_mistake(loop: LoopThread) -> None:
    has_begun, has_ended = threading.Event(), threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        (connection,) = here.state.connections
        while not connection.transport.is_closing():  # noqa: ASYNC110 - each round of the loop, and nothing tells it
            await asyncio.sleep(0)
        await answering(10)(scope, receive, send)
        has_ended.set()

    with serving(loop, app) as here, here.ask(b"connection: close") as asker:
        assert has_begun.wait(BOUND_S)
        asker.sendall(b"x")  # nothing may follow the request
        assert has_ended.wait(BOUND_S)


async def test_a_whole_answer_ends_once_its_last_slice_was_taken() -> None:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    response = JsonResponse("a" * (3 * SLICE_BYTES))
    await response.send_to(send)
    *slices, end = messages[1:]
    assert b"".join(each["body"] for each in slices) == response.body
    assert all(len(each["body"]) <= SLICE_BYTES and each["more_body"] for each in slices)
    assert end == {"type": "http.response.body", "body": b""}


async def test_a_large_event_is_sent_in_slices() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    large = ServerEvent({"text": "a" * (3 * SLICE_BYTES)})
    writer = EventStreamWriter(send)
    await writer.write([ServerEvent("a"), ServerEvent("b")])
    assert [each["body"] for each in sent] == [b"data: a\n\ndata: b\n\n"]
    await writer.end([large, ServerEvent("c")])
    *slices, end = sent[1:]
    assert b"".join(each["body"] for each in slices) == large.encoded() + b"data: c\n\n"
    assert all(len(each["body"]) <= SLICE_BYTES and each["more_body"] for each in slices)
    assert not end.get("more_body", False)


class Crowd:
    """Connections without sockets, and a simple model that says which of them may be closed to make room."""

    def __init__(self, max_connections: int) -> None:
        self.connections = OpenConnections(max_connections=max_connections)
        self.of: dict[int, str] = {}  # open connections
        self.silent: dict[int, None] = {}  # silent connections, the longest first
        self.sending: dict[int, None] = {}  # connections that send a request, the longest first
        self.closed: list[tuple[int, str]] = []
        self._num_opened = 0

    def open(self, client: str, *, idle: bool = True) -> ConnectionRoom:
        self._num_opened += 1
        number = self._num_opened
        room = self.connections.add(number, client, close=lambda: self._close(number))
        if room is not ConnectionRoom.NONE:
            self.of[number] = client
            if idle:
                self.become_idle(number)
        return room

    def become_idle(self, number: int) -> None:
        self.connections.is_idle(number)
        self.sending.pop(number, None)
        self.silent.setdefault(number)

    def send(self, number: int) -> None:
        """Sends a part of a request on this connection."""
        self.connections.is_idle(number, is_sending=True)
        self.silent.pop(number, None)
        self.sending.setdefault(number)

    def ask(self, number: int) -> None:
        self.connections.is_not_idle(number)
        self._forget(number)

    def leave(self, number: int) -> None:
        self.connections.remove(number)
        self._forget(number)
        del self.of[number]

    def may_lose(self, clients: Sequence[str]) -> list[int]:
        """Returns the connections that may be closed to make room, given the clients with the most idle connections."""
        for idle in (self.silent, self.sending):
            own = [[number for number in idle if self.of[number] == client] for client in clients]
            most = max(map(len, own))
            if most:
                return [numbers[0] for numbers in own if len(numbers) == most]
        return []

    def _close(self, number: int) -> None:
        self.closed.append((number, self.of.pop(number)))
        self._forget(number)

    def _forget(self, number: int) -> None:
        self.silent.pop(number, None)
        self.sending.pop(number, None)


def test_one_client_that_has_only_requests_leaves_an_eighth_to_others() -> None:
    crowd = Crowd(64)
    assert [crowd.open("one", idle=False) for _ in range(57)] == [ConnectionRoom.FREE] * 56 + [ConnectionRoom.NONE]
    assert [crowd.open("other", idle=False) for _ in range(9)] == [ConnectionRoom.FREE] * 8 + [ConnectionRoom.NONE]
    crowd.become_idle(1)
    assert [crowd.open(client, idle=False) for client in ("one", "other")] == [ConnectionRoom.MADE, ConnectionRoom.NONE]


def test_room_is_made_in_constant_time_however_many_clients_there_are() -> None:
    """A look at all clients for each closed connection would take a millisecond or more, and block the event loop."""
    crowd = Crowd(8192)
    for number in range(8192):
        crowd.open(str(number))
    began_s = time.thread_time()
    assert [crowd.open(f"new {number}") for number in range(8192)] == [ConnectionRoom.MADE] * 8192
    assert time.thread_time() - began_s < 2.0
    assert [number for number, _ in crowd.closed] == [*range(1, 8193)]


MOVES = ("open", "idle", "send", "ask", "leave")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(MOVES), st.integers(0)), min_size=8, max_size=40))
def test_whatever_clients_do_room_is_made_of_silent_connections_first_and_by_who_has_most(
    moves: list[tuple[str, str, int]],
) -> None:
    crowd = Crowd(8)
    for client in "aaaabbcd":
        crowd.open(client)
    for client, move, which in moves:
        if move == "open":
            num_own = list(crowd.of.values()).count(client)
            may_lose = crowd.may_lose([client] if num_own >= 7 else "abcd")
            is_full, num_closed = num_own >= 7 or len(crowd.of) >= 8, len(crowd.closed)
            room = crowd.open(client)
            assert room is (
                ConnectionRoom.FREE if not is_full else ConnectionRoom.MADE if may_lose else ConnectionRoom.NONE
            )
            assert [number in may_lose for number, _ in crowd.closed[num_closed:]] == [True] * (
                room is ConnectionRoom.MADE
            )
        elif crowd.of:
            number = list(crowd.of)[which % len(crowd.of)]
            act = {"idle": crowd.become_idle, "send": crowd.send, "ask": crowd.ask, "leave": crowd.leave}[move]
            act(number)


# ---- connections beyond the limit -----------------------------------------------------------------------------------

MAX_CONNECTIONS = 96
MANY = 150
LIVE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
OTHER = ("127.0.0.2", 0)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets gateways have few connections, as where a process may have few descriptors."""
    monkeypatch.setattr(gateway.main, "max_connections", lambda _wanted: MAX_CONNECTIONS)


def open_connections(
    here: GatewayHere, stack: ExitStack, *, source: str = "127.0.0.1", num: int = MANY
) -> Iterator[socket.socket]:
    """Opens up to `num` connections, more than a gateway may have."""
    for _ in range(num):
        yield stack.enter_context(socket.create_connection(("127.0.0.1", here.port), BOUND_S, (source, 0)))


def full(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line["event"] for line in lines if line["log_level"] == "warning"]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("sent", [b"", post(BODY)[:-1]], ids=["silent", "half a body"])
def test_connections_without_a_whole_request_make_room_for_others(edge: GatewayHere, sent: bytes) -> None:
    with capture_logs() as lines, ExitStack() as stack:
        for connection in open_connections(edge, stack):
            connection.sendall(sent)
        wait_until(lambda: edge.ask("GET", "/health/live").status == 200)  # it has looked at those that it accepted
        assert [edge.ask("GET", "/health/live").status for _ in range(5)] == [200] * 5
    assert full(lines) == ["connections_full"], "one for all"


@pytest.mark.usefixtures("few")
def test_where_all_have_a_request_others_are_told_when_to_come_again(
    edge: GatewayHere, scripted: ScriptedServer
) -> None:
    scripted.inference.script = [started(), scripted.inference.HOLD]
    answers: list[Answer] = []
    with capture_logs() as lines, ExitStack() as stack:
        for connection in open_connections(edge, stack):
            connection.sendall(post(BODY))
            answers.append(edge.ask("GET", "/health/live"))
            if answers[-1].status != 200:
                break
        assert edge.ask("GET", "/health/live", source=OTHER).status == 200, "one address leaves places to others"
    assert len(answers) > MAX_CONNECTIONS // 2
    told = answers[-1]
    assert (told.status, told.error["code"], told.headers["retry-after"]) == (503, "unavailable", "1")
    assert full(lines) == ["connections_full"]


def test_who_is_refused_while_its_body_is_on_the_way_gets_the_answer(own_loop: LoopThread) -> None:
    """The listener reads and drops the rest of a refused request for a while, on few connections at a time."""
    taken = OpenConnections(max_connections=1)
    taken.add(-1, "other", close=lambda: None)

    async def listen() -> asyncio.Server:
        bound = socket.create_server(("127.0.0.1", 0))
        listener = BoundedListener(bound, connections=taken, is_tls=False, linger_s=LONG_S)
        return await asyncio.get_running_loop().create_server(asyncio.Protocol, sock=listener)

    async def close(server: asyncio.Server) -> None:
        server.close()

    def is_closed(connection: socket.socket) -> bool:
        try:
            connection.sendall(b"x")
        except ConnectionError:
            return True
        return False

    server = own_loop.run(listen())
    address = server.sockets[0].getsockname()
    with ExitStack() as stack:
        stack.callback(lambda: own_loop.run(close(server)))

        def refused() -> socket.socket:
            connection = stack.enter_context(socket.create_connection(address, BOUND_S))
            connection.sendall(post(BODY))
            return connection

        first = refused()
        first.sendall(bytes(32 << 20))
        assert first.recv(64 << 10).startswith(b"HTTP/1.1 503 ")

        last = [refused() for _ in range(100)][-1]
        wait_until(lambda: is_closed(first))
        assert last.recv(64 << 10).startswith(b"HTTP/1.1 503 ")
        assert not is_closed(last)
        own_loop.skip(LONG_S)
        wait_until(lambda: is_closed(last))
        another = refused()
        own_loop.run(close(server))
        wait_until(lambda: is_closed(another))


@pytest.mark.usefixtures("few")
def test_an_upload_on_a_reused_connection_goes_on_while_silent_ones_make_room(
    edge: GatewayHere, scripted: ScriptedServer
) -> None:
    scripted.inference.script = [started(), delta([1], "a"), finished()]
    body, num_sent = json.dumps({**BODY, "prompt": "x" * (1 << 20)}).encode(), 0
    with ExitStack() as stack:
        upload = edge.begin_body(b"", num_bytes=len(body), after="/health/live")
        stack.enter_context(closing(upload))
        silent = list(open_connections(edge, stack, num=MAX_CONNECTIONS // 2))
        wait_until(lambda: edge.ask("GET", "/health/live").status == 200)  # earlier requests were read
        for _ in open_connections(edge, stack):
            upload.send(body[num_sent : num_sent + 2048])
            num_sent += 2048
        upload.send(body[num_sent:])
        assert upload.getresponse().status == 200
        assert len(silent) == MAX_CONNECTIONS // 2


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("more", [b"", b"x"], ids=["stopped", "dripping"])
def test_slow_bodies_make_room_before_who_is_silent_for_a_moment(edge: GatewayHere, more: bytes) -> None:
    """A body does not count as slow until it has been on its way for a moment."""
    begun = post({**BODY, "prompt": "x" * 10_000})[:200]
    with ExitStack() as stack:
        slow: list[socket.socket] = []

        def open_slow(source: str, num: int) -> None:
            for connection in open_connections(edge, stack, source=source, num=num):
                connection.sendall(begun)
                slow.append(connection)

        def is_served() -> bool:
            for connection in slow:
                with suppress(ConnectionError):  # the gateway closes it, to serve others
                    connection.sendall(more)
            (fresh,) = open_connections(edge, stack, num=1)
            if edge.ask("GET", "/health/live", source=OTHER).status != 200:  # it tells that it has accepted `fresh`
                return False  # it has accepted many at once, and not looked at them yet
            open_slow("127.0.0.4", 2)
            with suppress(ConnectionError):
                fresh.sendall(LIVE)
                return fresh.recv(1024).startswith(b"HTTP/1.1 200 ")
            return False

        open_slow(OTHER[0], MAX_CONNECTIONS // 2)
        open_slow("127.0.0.3", MAX_CONNECTIONS // 2)
        wait_until(is_served, bound_s=14.0)  # no body is refused in the first 15 s


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
def test_tls_handshakes_that_do_not_come_make_room_for_others(loop: LoopThread, tmp_path: Path, sent: bytes) -> None:
    authority = Authority(tmp_path, "ours")
    files = authority.issue("gateway")
    tls = {"tls_cert": files.certificate, "tls_key": files.key}
    with gateway_here(loop, "127.0.0.1:1", **tls) as here, ExitStack() as stack:
        for connection in open_connections(here, stack):
            connection.sendall(sent)
        context = ssl.create_default_context(cafile=str(authority.ca))
        for source in ("127.0.0.1", OTHER[0]):
            (connection,) = open_connections(here, stack, source=source, num=1)
            with context.wrap_socket(connection, server_hostname="127.0.0.1") as honest:
                honest.sendall(LIVE)
                assert honest.recv(1024).startswith(b"HTTP/1.1 200 ")
