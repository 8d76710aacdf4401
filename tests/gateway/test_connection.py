"""How long a connection waits for a client to take what was written. Its application writes an answer at once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from common.config.gateway_settings import GatewaySettings
from gateway.connection import bounded_connections
from gateway.limits import HttpLimits
from tests.e2e.running import wait_until
from tests.support.loop_thread import LoopThread

BOUND_S = 10.0
SMALL_BUFFER = 4096


@dataclass(frozen=True, slots=True)
class Serving:
    port: int
    state: ServerState

    @property
    def num_untaken(self) -> list[int]:
        """Bytes, of each connection that is open."""
        return [connection.transport.get_write_buffer_size() for connection in tuple(self.state.connections)]

    def ask(self, *head: bytes, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(BOUND_S)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(b"\r\n".join([b"GET / HTTP/1.1", b"host: x", *head, b"", b""]))
        return connection


@contextmanager
def serving(loop: LoopThread, *, answer_bytes: int, stall_timeout_s: float) -> Iterator[Serving]:
    """The system holds little of what it writes."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        length = str(answer_bytes).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": b"a" * answer_bytes})

    limits = HttpLimits.of(GatewaySettings(client_stall_timeout_s=stall_timeout_s))
    protocol, state = bounded_connections(limits), ServerState()
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)

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


def receive(connection: socket.socket, *, until_bytes: int, pause_s: float = 0.0) -> int:
    """How many bytes came, with a pause between any two reads."""
    num_bytes = 0
    while num_bytes < until_bytes and (data := connection.recv(64 << 10)):
        num_bytes += len(data)
        time.sleep(pause_s)
    return num_bytes


def test_a_slow_reader_gets_everything(loop: LoopThread) -> None:
    """Longer in all than it may take nothing."""
    answer_bytes = 2 << 20
    with (
        serving(loop, answer_bytes=answer_bytes, stall_timeout_s=0.5) as here,
        here.ask(b"connection: close", receive_buffer=64 << 10) as reader,
    ):
        began_s = time.monotonic()
        assert receive(reader, until_bytes=1 << 30, pause_s=0.03) > answer_bytes
        assert time.monotonic() - began_s > 2 * 0.5, "it was not slow"


def test_a_reader_that_has_taken_everything_is_waited_for(loop: LoopThread) -> None:
    answer_bytes, stall_timeout_s = 1 << 20, 0.5
    with (
        serving(loop, answer_bytes=answer_bytes, stall_timeout_s=stall_timeout_s) as here,
        here.ask() as reader,
    ):
        receive(reader, until_bytes=answer_bytes)
        reader.settimeout(2.5 * stall_timeout_s)
        with pytest.raises(TimeoutError):
            while reader.recv(64 << 10):
                pass
        reader.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        reader.settimeout(BOUND_S)
        assert receive(reader, until_bytes=1 << 30) > answer_bytes


@pytest.mark.parametrize("ending", [b"connection: close", b"connection: keep-alive", b"no colon"])
def test_nobody_is_waited_for_who_takes_nothing_of_the_little_that_is_left(loop: LoopThread, ending: bytes) -> None:
    """Less than makes asyncio pause: on a connection that is closing, and on one that is not."""
    with (
        serving(loop, answer_bytes=60_000, stall_timeout_s=0.5) as here,
        here.ask(receive_buffer=SMALL_BUFFER) as reader,
    ):
        wait_until(lambda: here.num_untaken != [] and 0 < here.num_untaken[0] < 64 << 10)
        reader.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + ending + b"\r\n\r\n")
        wait_until(lambda: here.num_untaken == [])
