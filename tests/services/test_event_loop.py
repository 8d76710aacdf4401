"""Tests that the programs' event loop handles all that gRPC has completed at a time, and shares gRPC's wakes with other
loops of the process.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.rpc.aio import EventLoop, run

NUM_CALLS = 100
BOUND_S = 60.0


class Wakes(socket.socket):
    """A socket of which others read before each read that shows what is there."""

    others_read: Callable[[], None] = staticmethod(lambda: None)

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        data = super().recv(num_bytes, flags)
        if flags & socket.MSG_PEEK:
            self.others_read()
        return data


class Completions:
    """Stands in for gRPC's completions. gRPC's thread writes a byte to a socket for each; a loop that reads one handles
    all that have come.
    """

    __module__ = "grpc._cython.cygrpc"

    def __init__(self) -> None:
        wakes, self._thread = socket.socketpair()
        self.wakes = Wakes(fileno=wakes.detach())
        self.wakes.setblocking(False)
        self.num_waiting = 0

    def complete(self, count: int) -> None:
        self.num_waiting += count
        self._thread.send(b"1" * count)

    def handle(self) -> None:
        self.wakes.recv(1)
        self.num_waiting = 0

    def close(self) -> None:
        self.wakes.close()
        self._thread.close()


@pytest.fixture
def completions() -> Iterator[Completions]:
    completions = Completions()
    yield completions
    completions.close()


@pytest.mark.parametrize(("num_before", "num_between"), [(0, 0), (1, 0), (5, 0), (0, 2), (0, 5)])
def test_whichever_loop_reads_a_wake_nothing_fails_and_all_is_handled(
    completions: Completions, num_before: int, num_between: int
) -> None:
    """Another loop takes wakes of five after this one is told of them and before it reads, or between two reads, when
    one more completes.
    """
    failures: list[dict[str, Any]] = []

    def another_loop_reads(count: int) -> None:
        for _ in range(count):
            completions.handle()

    def between() -> None:
        another_loop_reads(num_between)
        completions.complete(1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: failures.append(context))
        loop.add_reader(completions.wakes, completions.handle)
        completions.complete(5)
        completions.wakes.others_read = between
        loop.call_soon(another_loop_reads, num_before)  # runs when it is known what is ready, before what reads it
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loop.remove_reader(completions.wakes)

    run(main())
    assert failures == []
    assert completions.num_waiting == 0


def test_calls_that_have_ended_are_handled_in_few_iterations() -> None:
    """The calls are made in a process of its own, because loops of other tests would take some of their wakes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        assert process.submit(num_iterations).result(BOUND_S) < NUM_CALLS // 10


class WatchedLoop(EventLoop):
    """An event loop that shows the socket by which gRPC wakes it."""

    wakes: socket.socket

    @property
    def num_wakes(self) -> int:
        try:
            return len(self.wakes.recv(1 << 16, socket.MSG_PEEK))
        except BlockingIOError:
            return 0

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        if isinstance(fd, socket.socket):
            self.wakes = fd
        super().add_reader(fd, callback, *args)


def num_iterations() -> int:
    """Returns in how many iterations of its loop calls end that have all been answered while it was busy."""
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest())
            calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(NUM_CALLS)]
            await asyncio.sleep(0)
            while loop.num_wakes < NUM_CALLS:
                time.sleep(0.001)  # noqa: ASYNC251 - the loop is busy
            num = 0
            while not all(call.done() for call in calls):
                await asyncio.sleep(0)
                num += 1
            return num

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        num = runner.run(main())
    server.stop(None)
    return num
