"""Records the timelines of several services over the same period."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import grpc
import grpc.aio

from baton.client.channel import Tls, authorized, channel_options
from baton.client.target import single_server
from baton.errors import BatonError, Internal, error_from_rpc
from baton.v1 import timeline_pb2, timeline_pb2_grpc
from common.peer_text import peer_text

ANSWER_TIMEOUT_S = 60.0
"""Time limit in seconds for a recording to arrive after it has ended."""


class EventKind(Enum):
    """The kind of a timeline event, as in `baton.v1`.

    A SPAN is work on the track itself; the spans of a track nest. A TASK is work of an asyncio task, interleaved with
    other tasks; events with the same `task` nest. A COUNTER holds figures that are valid from `start_ns` on.
    """

    SPAN = timeline_pb2.TimelineEvent.SPAN
    TASK = timeline_pb2.TimelineEvent.TASK
    COUNTER = timeline_pb2.TimelineEvent.COUNTER


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One event of a timeline. `start_ns` is a time of the service's CLOCK_MONOTONIC. `task` is "" unless its kind is
    TASK.
    """

    kind: EventKind
    name: str
    start_ns: int
    duration_ns: int
    detail: str
    task: str
    figures: Mapping[str, int]

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class ServiceTimeline:
    """The recording of one service.

    `tracks` maps a track's name to its events, ordered by their ends. `num_dropped` maps it to the number of older
    events for which there was no room. Two services with equal, non-empty `clock_id`s share a clock. A time plus
    `unix_offset_ns` is Unix time.
    """

    address: str
    service: str
    instance_id: str
    clock_id: str
    unix_offset_ns: int
    start_ns: int
    end_ns: int
    tracks: Mapping[str, Sequence[TimelineEvent]]
    num_dropped: Mapping[str, int]


def record_timelines(
    addresses: Iterable[str],
    *,
    duration_s: float,
    max_events: int | None = None,
    tls: Tls | None = None,
    token: str | None = None,
) -> list[ServiceTimeline]:
    """Records all services at once and returns their timelines, in the order of `addresses`.

    `max_events` limits the events of each track, of which the newest are kept; None means the service's default. When
    one service fails, the other recordings end. Raises a BatonError that names the service: ResourceExhausted if
    it is being recorded by another caller, InvalidArgument for a bound out of range, Unavailable, Unauthenticated.
    """
    request = timeline_pb2.RecordTimelineRequest(duration_s=duration_s, max_events=max_events)
    timeout_s = duration_s + ANSWER_TIMEOUT_S

    async def record_all() -> list[ServiceTimeline]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_record(address, request, tls=tls, token=token, timeout_s=timeout_s))
                for address in addresses
            ]
        return [task.result() for task in tasks]

    try:
        return asyncio.run(record_all())
    except ExceptionGroup as failures:  # `except*` of Python 3.11.2 raises a group again
        told, others = failures.split(BatonError)
        if told is None or others is not None:
            raise
        raise told.exceptions[0] from None


async def _record(
    address: str, request: timeline_pb2.RecordTimelineRequest, *, tls: Tls | None, token: str | None, timeout_s: float
) -> ServiceTimeline:
    target, options = single_server(address), channel_options(tls, None)
    channel = (
        grpc.aio.insecure_channel(target, options)
        if tls is None
        else grpc.aio.secure_channel(target, tls.credentials(), options)
    )
    async with channel:
        stub = timeline_pb2_grpc.TimelineStub(authorized(channel, token))
        try:
            parts = [part async for part in stub.Record(request, timeout=timeout_s)]
        except grpc.RpcError as failure:
            error = error_from_rpc(failure)
            raise type(error)(
                f"{address}: {error}", reason=error.reason, metadata=error.metadata, code=error.code
            ) from None
    return _timeline_of(address, parts)


def _timeline_of(address: str, parts: Sequence[timeline_pb2.RecordTimelineResponse]) -> ServiceTimeline:
    if len(parts) < 2 or not (parts[0].HasField("started") and parts[-1].HasField("ended")):
        raise Internal(f"{address}: the recording is not whole", reason="PROTOCOL")
    started, ended = parts[0].started, parts[-1].ended
    tracks: dict[str, list[TimelineEvent]] = {peer_text(track.name): [] for track in ended.tracks}
    for part in parts[1:-1]:
        tracks[peer_text(part.events.track)] += _events(part.events)
    return ServiceTimeline(
        address=address,
        service=peer_text(started.service),
        instance_id=peer_text(started.instance_id),
        clock_id=peer_text(started.clock_id),
        unix_offset_ns=started.unix_offset_ns,
        start_ns=started.start_ns,
        end_ns=ended.end_ns,
        tracks=tracks,
        num_dropped={peer_text(track.name): track.num_dropped for track in ended.tracks},
    )


def _events(packed: timeline_pb2.TimelineEvents) -> list[TimelineEvent]:
    strings = list(map(peer_text, packed.strings))
    return [
        TimelineEvent(
            kind=EventKind(event.kind),
            name=strings[event.name],
            start_ns=event.start_ns,
            duration_ns=event.duration_ns,
            detail=strings[event.detail],
            task=strings[event.task],
            figures={strings[figure.name]: figure.value for figure in event.figures},
        )
        for event in packed.events
    ]
