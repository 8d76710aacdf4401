"""Tests that the programs' event loop takes all that gRPC has completed at a time."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.rpc.event_loop import run

NUM_CALLS = 1000


def test_calls_that_end_while_the_loop_is_busy_are_handled_together() -> None:
    """With asyncio's own loop each of the calls takes an iteration, and most cannot even end before."""
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert run(_num_iterations(port)) < NUM_CALLS // 4
    finally:
        server.stop(None)


async def _num_iterations(port: int) -> int:
    """Returns in how many iterations of the loop the calls end, after it was blocked."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
        calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(NUM_CALLS)]
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251 - the loop is to be blocked
        num_iterations = 0
        async with asyncio.timeout(60):
            while not all(call.done() for call in calls):
                await asyncio.sleep(0)
                num_iterations += 1
        return num_iterations
