"""Tests of timeline recordings over gRPC: they are limited, need a token, exclude each other, and end when their caller
leaves.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton import errors
from baton.timeline import record_timelines
from baton.v1 import timeline_pb2, timeline_pb2_grpc
from common.service.server import ServiceServer
from common.telemetry.timeline import EventKind, RecordedTrack, Recording, Timeline
from common.telemetry.timeline_rpc import MAX_EVENTS, TimelineServicer

BOUND_S = 60.0
SHORT_S = 0.05
TOKEN = "old-0123456789"


@asynccontextmanager
async def served(
    timeline: Timeline, tokens: tuple[str, ...] = (), *, answer_timeout_s: float = BOUND_S
) -> AsyncIterator[str]:
    """Yields the address of a service that offers `timeline`."""
    servicer = TimelineServicer(
        timeline=timeline, service="baton.v1.Inference", instance_id="i", answer_timeout_s=answer_timeout_s
    )
    server = ServiceServer(service_name="baton.v1.Inference", tokens=tokens, timeline=servicer)
    port = await server.start("127.0.0.1:0")
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
def timeline() -> Timeline:
    timeline = Timeline()
    timeline.track("engine")
    return timeline


@asynccontextmanager
async def recording(address: str) -> AsyncIterator[None]:
    """Lets another caller record from the beginning to the end of the block."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = timeline_pb2_grpc.TimelineStub(channel).Record(timeline_pb2.RecordTimelineRequest(duration_s=60))
        assert (await call.read()).HasField("started")  # type: ignore[attr-defined]
        yield
        call.cancel()


def is_recorded(timeline: Timeline) -> bool:
    return timeline.track("engine").ring is not None


async def test_what_happens_meanwhile_is_answered_in_order(timeline: Timeline) -> None:
    async def work() -> None:
        while not is_recorded(timeline):  # noqa: ASYNC110 - it can only be looked at
            await asyncio.sleep(0)
        track = timeline.track("engine")
        for number in range(5000):
            with track.span("step", f"step {number}", rows=number, slots=-1):
                pass
        with track.task("write", "request"):
            pass

    async with served(timeline) as address:
        working = asyncio.create_task(work())
        (recorded,) = await asyncio.to_thread(record_timelines, [address], duration_s=0.5)
        await working
    assert (recorded.service, recorded.instance_id) == ("baton.v1.Inference", "i")
    *steps, write = recorded.tracks["engine"]
    assert [(step.detail, step.figures) for step in steps] == [
        (f"step {number}", {"rows": number, "slots": -1}) for number in range(5000)
    ]
    assert all(recorded.start_ns - 1_000_000_000 < step.start_ns <= step.end_ns <= recorded.end_ns for step in steps)
    assert (write.kind, write.task, recorded.num_dropped) == (EventKind.TASK, "request", {"engine": 0})
    assert not is_recorded(timeline)


async def test_a_second_recording_is_refused_and_the_first_goes_on(timeline: Timeline) -> None:
    async with served(timeline) as address, recording(address):
        with pytest.raises(errors.ResourceExhausted, match=f"{address}: the timeline is being recorded") as refusal:
            await asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S)
        assert refusal.value.reason == "RECORDING_IN_PROGRESS"
        assert is_recorded(timeline)


class SlowlyRead(Timeline):
    """A timeline whose recording, when it is read, blocks until `may_go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.track("engine")

    def stop(self) -> Recording:
        recording = super().stop()
        read = recording.take_tracks

        def take_tracks() -> list[RecordedTrack]:
            self.may_go_on.wait(BOUND_S)
            return read()

        recording.take_tracks = take_tracks  # type: ignore[method-assign]
        return recording


async def test_nobody_records_before_the_last_recording_was_sent() -> None:
    timeline = SlowlyRead()
    async with served(timeline) as address:
        first = asyncio.create_task(asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S))
        async with asyncio.timeout(BOUND_S):
            while not is_recorded(timeline):  # noqa: ASYNC110 - it can only be looked at
                await asyncio.sleep(0.01)
            while is_recorded(timeline):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(errors.ResourceExhausted):
            await asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S)
        timeline.may_go_on.set()
        (recorded,) = await first
    assert recorded.tracks == {"engine": []}


async def test_a_recording_that_is_not_sent_in_time_is_given_up() -> None:
    timeline = SlowlyRead()
    async with served(timeline, answer_timeout_s=SHORT_S) as address:
        with pytest.raises(errors.BatonError, match="did not take all within"):
            await asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S)
        with pytest.raises(errors.BatonError, match="did not take all within"):  # it may be recorded again
            await asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S)
    timeline.may_go_on.set()
    async with served(timeline) as address:
        (recorded,) = await asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S)
    assert recorded.tracks == {"engine": []}


async def test_a_recording_ends_when_its_caller_leaves(timeline: Timeline) -> None:
    async with served(timeline) as address:
        async with recording(address):
            assert is_recorded(timeline)
        async with asyncio.timeout(BOUND_S):
            while is_recorded(timeline):  # noqa: ASYNC110 - it can only be looked at
                await asyncio.sleep(0.01)
        (recorded,) = await asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S)
    assert recorded.tracks == {"engine": []}


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("duration_s", timeline_pb2.RecordTimelineRequest(duration_s=0)),
        ("duration_s", timeline_pb2.RecordTimelineRequest(duration_s=60.1)),
        ("duration_s", timeline_pb2.RecordTimelineRequest(duration_s=float("nan"))),
        ("max_events", timeline_pb2.RecordTimelineRequest(max_events=0)),
        ("max_events", timeline_pb2.RecordTimelineRequest(max_events=MAX_EVENTS + 1)),
    ],
)
async def test_bounds_are_refused_by_name(
    timeline: Timeline, field: str, request_: timeline_pb2.RecordTimelineRequest
) -> None:
    async with served(timeline) as address, grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [part async for part in timeline_pb2_grpc.TimelineStub(channel).Record(request_)]
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (refusal.value.details() or "").startswith(f"{field}: ")
    assert not is_recorded(timeline)


async def test_recording_needs_a_token_where_tokens_are_asked_for(timeline: Timeline) -> None:
    async with served(timeline, tokens=(TOKEN,)) as address:
        with pytest.raises(errors.Unauthenticated):
            await asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S)
        (recorded,) = await asyncio.to_thread(record_timelines, [address], duration_s=SHORT_S, token=TOKEN)
    assert recorded.address == address


async def test_where_one_service_cannot_be_recorded_the_others_recordings_end(timeline: Timeline) -> None:
    async with served(timeline) as address, served(Timeline(), tokens=(TOKEN,)) as closed:
        with pytest.raises(errors.Unauthenticated, match=closed):
            await asyncio.to_thread(record_timelines, [address, closed], duration_s=BOUND_S)
        async with asyncio.timeout(BOUND_S / 2):
            while is_recorded(timeline):  # noqa: ASYNC110 - it can only be looked at
                await asyncio.sleep(0.01)
