"""Records the timelines of several services over the same period, and writes them as a file for Perfetto's viewer:
Chrome's JSON trace events, compressed.

A service becomes a process, a track a thread, and a task an async slice. The spans of one flow, such as one KV segment,
are joined by arrows in the order of time, also across services.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.client.channel import Tls, authorized, channel_options, single_server
from baton.errors import BatonError, Internal, error_from_rpc
from baton.v1 import timeline_pb2, timeline_pb2_grpc
from common.peer_text import peer_text
from common.telemetry.timeline import FLOW, EventKind, TimelineEvent

ANSWER_TIMEOUT_S = 60.0
"""Time limit in seconds for a recording to arrive after it has ended."""
_TOKENIZE = ("tokenize", "tokenize-long", "tokenize-longest")
TRACK_ORDER = ("edge", *_TOKENIZE, "handoff", "engine", "forward", "landing", "sending")


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


TraceEvent = dict[str, Any]


def write_trace(path: Path, timelines: Sequence[ServiceTimeline]) -> int:
    """Writes the timelines to a gzip file. Returns the number of events in it.

    Raises OSError if the file cannot be written.
    """
    events = trace_events(timelines)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(timelines)}, file)
    return len(events)


def trace_events(timelines: Sequence[ServiceTimeline]) -> list[TraceEvent]:
    """Returns the trace events. Their times are in µs from the start of the earliest recording."""
    offsets_ns = _offsets_ns(timelines)
    base_ns = min(each.start_ns + offset_ns for each, offset_ns in zip(timelines, offsets_ns, strict=True))
    events: list[TraceEvent] = []
    for pid, (timeline, offset_ns) in enumerate(zip(timelines, offsets_ns, strict=True), start=1):
        events += _service_events(timeline, pid, offset_ns - base_ns)
    return events + list(_arrows(events))


def _offsets_ns(timelines: Sequence[ServiceTimeline]) -> list[int]:
    """Returns for each service the offset, in ns, that turns its times into Unix time, so that all share one axis.

    If all services share a clock, all get the first one's offset.
    """
    first = timelines[0]
    is_one_clock = first.clock_id != "" and all(each.clock_id == first.clock_id for each in timelines)
    return [first.unix_offset_ns if is_one_clock else each.unix_offset_ns for each in timelines]


def _service_events(timeline: ServiceTimeline, pid: int, shift_ns: int) -> Iterator[TraceEvent]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{timeline.service} {timeline.address}"}}
    names = sorted(timeline.tracks, key=lambda name: (TRACK_ORDER.index(name) if name in TRACK_ORDER else 99, name))
    for tid, name in enumerate(names, start=1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for event in sorted(timeline.tracks[name], key=lambda event: (event.start_ns, -event.duration_ns)):
            yield from _event(event, pid, tid, name, shift_ns)


def _event(event: TimelineEvent, pid: int, tid: int, track: str, shift_ns: int) -> Iterator[TraceEvent]:
    common = {"pid": pid, "tid": tid, "name": event.name, "cat": track, "ts": (event.start_ns + shift_ns) / 1e3}
    args = {**event.figures, **({"of": event.detail} if event.detail else {})}
    match event.kind:
        case EventKind.SPAN:
            yield {**common, "ph": "X", "dur": event.duration_ns / 1e3, "args": args}
        case EventKind.TASK:
            task = f"{pid}/{event.task}"
            yield {**common, "ph": "b", "id": task, "args": {**args, "task": event.task}}
            yield {**common, "ph": "e", "id": task, "ts": (event.end_ns + shift_ns) / 1e3}
        case EventKind.COUNTER:
            yield {**common, "ph": "C", "args": args}


def _arrows(events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Yields the arrows that join the spans of each flow, such as one KV segment, in the order of time."""
    spans = [event for event in events if event["ph"] == "X" and FLOW in event["args"]]
    spans.sort(key=lambda span: (span["args"][FLOW], span["ts"]))
    for flow, group in groupby(spans, key=lambda span: span["args"][FLOW]):
        members = list(group)
        if len(members) < 2:
            continue
        for place, span in enumerate(members):
            phase = "s" if place == 0 else "f" if place == len(members) - 1 else "t"
            where = {name: span[name] for name in ("pid", "tid", "ts")}
            yield {**where, "ph": phase, "id": flow, "name": "KvSegment", "cat": FLOW, "bp": "e"}


def _about(timelines: Sequence[ServiceTimeline]) -> dict[str, str]:
    """Maps the name and address of each service to a text: its instance id, and how many events it dropped."""
    return {
        f"{each.service} {each.address}": f"instance {each.instance_id}, {sum(each.num_dropped.values())} dropped"
        for each in timelines
    }
