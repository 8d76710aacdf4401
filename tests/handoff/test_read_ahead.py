"""Tests that a call reads its next frame while the current one is decoded and posted, if the receive budget has room
for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from common.telemetry.timeline import Track
from common.wire.codec_frames import FrameCodec
from common.wire.handoff import Accepted, KvSegment
from decode_service.handoff.grpc_call import GrpcCall
from decode_service.handoff.grpc_replica import GrpcReplica
from decode_service.handoff.receive_budget import ReceiveBudget
from decode_service.messages import FrameArrived, StartHandoff
from tests.handoff.homes import FAST
from tests.handoff.samples import FINGERPRINT, ROOMY_BUDGET_BYTES, SEGMENT_BYTES, row, segment
from tests.wire.strategies import VOCAB_SIZE

CODEC = FrameCodec(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE)
FRAMES = (CODEC.encode(Accepted("i")), *(CODEC.encode(segment(place=place)) for place in range(3)))


class ArrivedStream:
    """A stream whose frames have all arrived."""

    def __init__(self) -> None:
        self.num_read = 0

    async def write(self, data: bytes) -> None:
        pass

    async def initial_metadata(self) -> object:
        return ()

    async def read(self) -> Any:
        self.num_read += 1
        return FRAMES[self.num_read - 1] if self.num_read <= len(FRAMES) else grpc.aio.EOF

    def cancel(self) -> None:
        pass


def call_over(stream: object, *, budget: ReceiveBudget, post: Callable[[Any], None]) -> GrpcCall:
    """Returns a call of one row. `stream` stands in for its gRPC stream."""

    async def ready() -> None:
        pass

    channel = SimpleNamespace(channel_ready=ready, stream_stream=lambda _method: lambda metadata: stream)
    replica = SimpleNamespace(next_channel=lambda: channel, num_steps=0, pool=None)
    return GrpcCall(
        command=StartHandoff("call", "replica", (row(),)),
        replica=cast(GrpcReplica, replica),
        fingerprint=FINGERPRINT,
        codec=CODEC,
        budget=budget,
        post=post,
        timeouts=FAST,
        metadata=(),
        track=Track("handoff"),
    )


@pytest.mark.parametrize(
    ("limit_bytes", "num_read"),
    [pytest.param(ROOMY_BUDGET_BYTES, [3, 4, 5], id="room"), pytest.param(SEGMENT_BYTES, [2, 3, 4], id="no-room")],
)
async def test_the_next_frame_is_read_while_a_segment_is_posted(limit_bytes: int, num_read: list[int]) -> None:
    stream, budget = ArrivedStream(), ReceiveBudget(limit_bytes)
    seen: list[int] = []

    def post(command: Any) -> None:
        if isinstance(command, FrameArrived) and isinstance(command.frame, KvSegment):
            seen.append(stream.num_read)
            budget.give_back(command.frame.num_bytes)

    call = call_over(stream, budget=budget, post=post)
    await call.exchange()
    assert seen == num_read


async def test_what_is_read_ahead_for_is_nobody_elses() -> None:
    budget = ReceiveBudget(SEGMENT_BYTES)
    assert budget.take_at_once(SEGMENT_BYTES)
    assert not budget.take_at_once(1)
    budget.give_back(SEGMENT_BYTES)
    assert budget.take_at_once(1)
