"""Tests that a cancellation does not interrupt a read from a gRPC stream, because grpcio would never free its
message.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest

from common.rpc.aio import whole_read
from common.rpc.grpc_options import channel_options
from decode_service.handoff.grpc_call import Stream
from decode_service.handoff.receive_budget import ReceiveBudget
from tests.handoff.homes import FAST
from tests.handoff.raw_replica import RawReplica
from tests.handoff.samples import ROOMY_BUDGET_BYTES
from tests.handoff.test_read_ahead import call_over

MESSAGE = bytes(60_000)
NUM_CALLS = 500
MAX_GROWTH = NUM_CALLS * len(MESSAGE) // 4


@pytest.fixture
async def replica() -> AsyncIterator[RawReplica]:
    replica = RawReplica()
    replica.frames = [MESSAGE] * 8
    replica.hangs = True
    await replica.start()
    yield replica
    await replica.stop()


async def test_messages_of_broken_off_reads_are_freed(replica: RawReplica) -> None:
    """Each call is abandoned while a read waits for a message that is on its way."""
    process = psutil.Process()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{replica.port}", options=channel_options()) as channel:

        async def break_off_a_call() -> None:
            stream: Stream = channel.stream_stream("/baton.v1.Prefill/Handoff")()
            await stream.write(b"")
            await stream.read()
            reading = asyncio.create_task(whole_read(stream.read()))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
            assert reading.cancelled()
            await asyncio.sleep(0.001)
            stream.cancel()

        for _ in range(NUM_CALLS // 4):  # the allocator settles
            await break_off_a_call()
        before = process.memory_info().rss
        for _ in range(NUM_CALLS):
            await break_off_a_call()
        growth = process.memory_info().rss - before
    assert growth < MAX_GROWTH, f"{growth / 2**20:.1f} MiB"


async def test_nobody_hears_of_the_failure_of_a_broken_off_read() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    fails = asyncio.Event()

    async def read() -> bytes:
        await fails.wait()
        raise RuntimeError("the call has ended")

    reading = asyncio.create_task(whole_read(read()))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    fails.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert reported == []


class HangingStream:
    """A stream on which nothing arrives."""

    def __init__(self) -> None:
        self.is_read = asyncio.Event()
        self.was_interrupted = False
        self.ended: asyncio.Event = asyncio.Event()

    async def write(self, data: bytes) -> None:
        pass

    async def initial_metadata(self) -> object:
        return ()

    async def read(self) -> bytes:
        self.is_read.set()
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.was_interrupted = True
            raise
        return b""

    def cancel(self) -> None:
        self.ended.set()


async def test_a_handoff_that_is_cancelled_does_not_interrupt_its_read() -> None:
    stream = HangingStream()
    call = call_over(stream, budget=ReceiveBudget(ROOMY_BUDGET_BYTES), post=lambda _command: None)
    exchange = asyncio.create_task(call.exchange())
    await asyncio.wait_for(stream.is_read.wait(), FAST.accept_timeout_s)
    exchange.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange
    await asyncio.sleep(0)
    assert stream.ended.is_set()
    assert not stream.was_interrupted
