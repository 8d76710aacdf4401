"""Measures a gRPC stream of bytes between two Python processes, for comparison with a handoff.

The stream is either bare, or it does to the bytes what a handoff does: the sender copies each message into a frame and
computes its checksum; the receiver checks the checksum and copies the message into a pool before it reads the next one.
The event loops do all of this, without engines, threads and validation.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection

import grpc
import numpy as np
import torch
from awscrt.checksums import crc32c
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from baton.v1 import prefill_pb2
from baton_cpu.kv_copy import copy_blocks, copy_kv
from benchmarks.peer_process import peer_process, until_closed
from common.rpc.grpc_options import channel_options, server_options
from common.wire.framing import FramePayload, seal

MESSAGE_BYTES = (1 << 20, 2 << 20, 4 << 20, 8 << 20)
_SERVICE, _METHOD = "benchmark.Bare", "Stream"
_LAYER_GROUP = "target"
_BOUND_S = 120.0


@dataclass(frozen=True, slots=True)
class StreamRates:
    """The rates of both kinds of stream in bytes per second, by the size of a message in bytes."""

    bare: dict[int, float]
    handling: dict[int, float]


async def stream_rates(num_bytes: int, *, kept_bytes: int, first_bytes: int, begins_bare: bool) -> StreamRates:
    """Measures streams of `num_bytes` at each message size, bare and with a handoff's work.

    The messages are slices of a buffer of `kept_bytes`, because one message sent again and again would stay in a cache.
    Before each measurement `first_bytes` are streamed as a warm-up. Amounts are rounded to whole messages, at least
    one. `begins_bare` says which kind of stream goes first.
    """
    kept_bytes, first_bytes = max(kept_bytes, *MESSAGE_BYTES), max(first_bytes, *MESSAGE_BYTES)
    torch.set_num_threads(1)
    copy_blocks()  # so that its kernel is compiled before the measurement
    rates = StreamRates({}, {})
    bare, handling = (rates.bare, None), (rates.handling, torch.zeros(first_bytes, dtype=torch.uint8))
    with peer_process(partial(_serve, kept_bytes)) as address:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            await asyncio.wait_for(channel.channel_ready(), _BOUND_S)
            call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{_SERVICE}/{_METHOD}")
            for message_bytes in MESSAGE_BYTES:
                for by_size, pool in (bare, handling) if begins_bare else (handling, bare):
                    await _rate(call, message_bytes, first_bytes // message_bytes, pool)
                    by_size[message_bytes] = await _rate(call, message_bytes, -(-num_bytes // message_bytes), pool)
    return rates


def at_best_size(rounds: Sequence[dict[int, float]]) -> tuple[int, list[float]]:
    """Returns the message size with the best median rate, and the rate of each round at this size."""
    best = max(MESSAGE_BYTES, key=lambda size: statistics.median(rates[size] for rates in rounds))
    return best, [rates[best] for rates in rounds]


async def _rate(
    call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes], message_bytes: int, num_messages: int, pool: Tensor | None
) -> float:
    """Streams messages and returns the rate in bytes per second.

    Each message is copied to the next place in `pool`; None makes the stream bare.
    """
    begun_s = time.perf_counter()
    stream = call(f"{message_bytes} {num_messages} {pool is not None:d}".encode(), timeout=_BOUND_S)
    num_received = 0
    while isinstance(message := await stream.read(), bytes):
        if pool is not None:
            place = num_received % (len(pool) // message_bytes) * message_bytes
            _land(message, pool[place : place + message_bytes])
        num_received += 1
    if num_received != num_messages:
        raise RuntimeError(f"{num_received} messages came, not {num_messages}")
    return num_messages * message_bytes / (time.perf_counter() - begun_s)


def _land(frame: bytes, target: Tensor) -> None:
    payload = np.frombuffer(frame, np.uint8, len(target))
    crc32c(payload)
    copy_kv(target.view(1, 1, -1), from_dlpack(payload).view(1, 1, -1))


async def _serve(kept_bytes: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    content = torch.randint(0, 256, (kept_bytes,), dtype=torch.uint8).numpy()

    @cache
    def messages(message_bytes: int) -> list[bytes]:
        return [content[start : start + message_bytes].tobytes() for start in starts(message_bytes)]

    def starts(message_bytes: int) -> range:
        return range(0, kept_bytes - message_bytes + 1, message_bytes)

    async def stream(request: bytes, _context: object) -> AsyncIterator[bytes]:
        message_bytes, num_messages, is_handling = map(int, request.split())
        places = starts(message_bytes)
        for number in range(num_messages):
            place = number % len(places)
            if is_handling:
                yield _frame(content[places[place] : places[place] + message_bytes])
            else:
                yield messages(message_bytes)[place]

    server = grpc.aio.server(options=server_options())
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        pipe.send(port)
        await until_closed(pipe)
    finally:
        await server.stop(0)


def _frame(content: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    payload = FramePayload(len(content), partial(np.copyto, src=content))
    return seal(prefill_pb2.HandoffFrame(kv_segment=prefill_pb2.KvSegment(layer_group=_LAYER_GROUP)), payload)
