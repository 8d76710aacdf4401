"""Writes timelines as a file for Perfetto's viewer: Chrome's JSON trace events, compressed.

A service becomes a process, a track a thread, and a task an async slice. The spans of one flow, such as one KV segment,
are joined by arrows in the order of time, also across services.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from baton.timeline import EventKind, ServiceTimeline, TimelineEvent

FLOW = "flow"
_TOKENIZE = ("tokenize", "tokenize-long", "tokenize-longest")
TRACK_ORDER = ("edge", *_TOKENIZE, "handoff", "engine", "forward", "landing", "sending")

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
