"""The Timeline service: a caller records what a service does, for a bounded time. There is one recording at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc

from baton.v1 import timeline_pb2, timeline_pb2_grpc
from common.errors import BatonError, InvalidRequest, RecordingInProgress, RequestCancelled
from common.rpc.errors import abort_with
from common.telemetry.timeline import EventKind, RecordedTrack, Recording, Timeline, TimelineEvent

TIMELINE_SERVICE: str = timeline_pb2.DESCRIPTOR.services_by_name["Timeline"].full_name
MAX_DURATION_S = 60.0
DEFAULT_DURATION_S = 5.0
MAX_EVENTS = 1 << 18
DEFAULT_MAX_EVENTS = 1 << 16
_WRITE_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 60.0
_EVENTS_PER_MESSAGE = 2048
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KINDS = {kind: timeline_pb2.TimelineEvent.Kind.Value(kind.name) for kind in EventKind}

Context = grpc.aio.ServicerContext[Any, Any]


class OtherTimeline(Protocol):
    """The timeline of another process of the service, on the same machine."""

    async def start(self, *, max_events: int) -> None: ...

    async def stop(self) -> Sequence[RecordedTrack]: ...


class TimelineServicer(timeline_pb2_grpc.TimelineServicer):
    """Records the timeline for a caller. Use it from the event loop only; events are encoded on a thread, after the
    recording.

    A caller counts as gone if it reads nothing for `_WRITE_TIMEOUT_S`, or takes longer than `answer_timeout_s` for the
    whole answer. Until then no other caller can record, so at most one recording is in memory. The `other` timeline, if
    any, is recorded with it.
    """

    def __init__(
        self,
        *,
        timeline: Timeline,
        service: str,
        instance_id: str,
        other: OtherTimeline | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._is_busy = False
        self._timeline = timeline
        self._service = service
        self._instance_id = instance_id
        self._other = other
        self._answer_timeout_s = answer_timeout_s

    async def Record(  # type: ignore[override]  # the asyncio server also takes a coroutine that writes
        self, request: timeline_pb2.RecordTimelineRequest, context: Context
    ) -> None:
        try:
            duration_s, max_events = _checked(request)
            if self._is_busy:
                raise RecordingInProgress("the timeline is being recorded for somebody else")
            self._is_busy = True
            try:
                recording, tracks = await self._record(context, duration_s, max_events)
                async with asyncio.timeout(self._answer_timeout_s):
                    tracks += await asyncio.to_thread(recording.take_tracks)
                    await self._answer(context, tracks, recording.end_ns)
            except TimeoutError:
                raise RequestCancelled(f"the caller did not take all within {self._answer_timeout_s} s") from None
            finally:
                self._is_busy = False
        except BatonError as error:
            await abort_with(context, error)

    async def _record(
        self, context: Context, duration_s: float, max_events: int
    ) -> tuple[Recording, list[RecordedTrack]]:
        """Returns the recording of this process, and the tracks of the other one."""
        other: list[RecordedTrack] = []
        self._timeline.start(max_events=max_events)
        try:
            if self._other is not None:  # if the caller leaves meanwhile, the other process ends what it has begun
                await self._other.start(max_events=max_events)
            started = timeline_pb2.TimelineStarted(
                service=self._service,
                instance_id=self._instance_id,
                start_ns=time.monotonic_ns(),
                unix_offset_ns=time.time_ns() - time.monotonic_ns(),
                clock_id=_clock_id(),
            )
            try:
                await self._write(context, timeline_pb2.RecordTimelineResponse(started=started))
                await asyncio.sleep(duration_s)
            finally:
                if self._other is not None:
                    other += await self._other.stop()
        finally:
            recording = self._timeline.stop()
        return recording, other

    async def _answer(self, context: Context, tracks: Sequence[RecordedTrack], end_ns: int) -> None:
        for track in tracks:
            for begin in range(0, len(track.events), _EVENTS_PER_MESSAGE):
                events = track.events[begin : begin + _EVENTS_PER_MESSAGE]
                message = await asyncio.to_thread(_events_message, track.name, events)
                await self._write(context, timeline_pb2.RecordTimelineResponse(events=message))
        ended = timeline_pb2.TimelineEnded(end_ns=end_ns, tracks=_sizes(tracks))
        await self._write(context, timeline_pb2.RecordTimelineResponse(ended=ended))

    async def _write(self, context: Context, response: timeline_pb2.RecordTimelineResponse) -> None:
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await context.write(response)
        except TimeoutError:
            raise RequestCancelled(f"the caller took nothing for {_WRITE_TIMEOUT_S} s") from None


def _checked(request: timeline_pb2.RecordTimelineRequest) -> tuple[float, int]:
    """Returns for how many seconds to record, and how many events of a track to keep at most, as the request asks.

    Raises InvalidRequest if one of them is out of range.
    """
    duration_s = request.duration_s if request.HasField("duration_s") else DEFAULT_DURATION_S
    max_events = request.max_events if request.HasField("max_events") else DEFAULT_MAX_EVENTS
    if not 0 < duration_s <= MAX_DURATION_S:
        raise InvalidRequest("duration_s", f"{duration_s} is not in (0, {MAX_DURATION_S:g}]")
    if not 1 <= max_events <= MAX_EVENTS:
        raise InvalidRequest("max_events", f"{max_events} is not in 1 .. {MAX_EVENTS}")
    return duration_s, max_events


def _clock_id() -> str:
    """Returns the boot id of this machine's kernel, or "" if it cannot be read.

    All processes with the same id share one CLOCK_MONOTONIC.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _events_message(track: str, events: list[TimelineEvent]) -> timeline_pb2.TimelineEvents:
    """Encodes the events of a track as one message.

    It is filled in place: copying separately built messages into it would take three times as long.
    """
    indices = {"": 0}

    def index(text: str) -> int:
        return indices.setdefault(text, len(indices))

    message = timeline_pb2.TimelineEvents(track=track)
    add = message.events.add
    for kind, name, start_ns, duration_ns, detail, task, figures in events:
        packed = add(kind=_KINDS[kind], name=index(name), start_ns=start_ns, duration_ns=duration_ns)
        if detail:
            packed.detail = index(detail)
        if task:
            packed.task = index(task)
        for figure, value in figures.items():
            packed.figures.add(name=index(figure), value=value)
    message.strings.extend(indices)
    return message


def _sizes(tracks: Sequence[RecordedTrack]) -> Iterator[timeline_pb2.TimelineTrack]:
    for track in tracks:
        yield timeline_pb2.TimelineTrack(name=track.name, num_events=len(track.events), num_dropped=track.num_dropped)
