"""Reads an engine's forwards, and the engine steps that scheduled them, from a recorded timeline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.timeline import ServiceTimeline
from common.telemetry.timeline import EventKind, TimelineEvent

_WAITS = ("wait", "resolve_seq_lens")
"""Spans inside an engine's step in which the engine only waits for the stream."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward of the model: all work of one step on the forward stream.

    `busy_ns` is the time in which that work was running. `figures` are the numbers attached to it, such as the rows.
    """

    start_ns: int
    end_ns: int
    busy_ns: int
    figures: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Timing of consecutive forwards that have the same number of rows. Times are in seconds.

    `between_s` is the median time from the end of a forward to the start of the next one, and `between_p99_s` the 99th
    percentile. `schedule_s` is the median time of an engine step without its waits for the stream. `busy` is the share
    of time in which the forward stream was working.
    """

    num_steps: int
    forward_s: float
    between_s: float
    between_p99_s: float
    schedule_s: float
    busy: float
    context_tokens: float


def forwards(timeline: ServiceTimeline) -> list[Forward]:
    """Returns the forwards in a timeline, in the order of time. Events with the same `detail` belong to one forward.

    Raises ValueError when events were dropped from the recording.
    """
    by_scope: dict[str, list[TimelineEvent]] = {}
    for event in _whole_track(timeline, "forward"):
        if event.detail:
            by_scope.setdefault(event.detail, []).append(event)
    return sorted(
        (
            Forward(
                start_ns=min(piece.start_ns for piece in pieces),
                end_ns=max(piece.end_ns for piece in pieces),
                busy_ns=sum(piece.duration_ns for piece in pieces),
                figures={name: value for piece in pieces for name, value in piece.figures.items()},
            )
            for pieces in by_scope.values()
        ),
        key=lambda forward: forward.start_ns,
    )


def step_figures(timeline: ServiceTimeline, *, num_rows: int) -> StepFigures:
    """Computes the timing of decode forwards with `num_rows` rows.

    Raises ValueError when no two such forwards follow each other, and when events were dropped, because times between
    forwards would be wrong.
    """
    every = forwards(timeline)[1:-1]  # the recording may have cut off the first and the last
    pairs = [
        (one, next_)
        for one, next_ in pairwise(every)
        if one.figures.get("rows") == next_.figures.get("rows") == num_rows
    ]
    if not pairs:
        raise ValueError(f"no steps of {num_rows} rows follow each other among {len(every)}")
    between_s = [(next_.start_ns - one.end_ns) / 1e9 for one, next_ in pairs]
    forward_s = [(one.end_ns - one.start_ns) / 1e9 for one, _ in pairs]
    return StepFigures(
        num_steps=len(pairs),
        forward_s=statistics.median(forward_s),
        between_s=statistics.median(between_s),
        between_p99_s=sorted(between_s)[int(0.99 * (len(between_s) - 1))],
        schedule_s=statistics.median(_schedule_s(timeline)),
        busy=sum(one.busy_ns for one, _ in pairs) / sum(next_.start_ns - one.start_ns for one, next_ in pairs),
        context_tokens=statistics.median(one.figures["context_tokens"] for one, _ in pairs),
    )


def _whole_track(timeline: ServiceTimeline, name: str) -> Sequence[TimelineEvent]:
    if num_dropped := timeline.num_dropped[name]:
        raise ValueError(f"{num_dropped} events of {name} were dropped: record for less time")
    return timeline.tracks[name]


def _schedule_s(timeline: ServiceTimeline) -> Iterable[float]:
    """Yields the scheduling time of each engine step that launched a forward, in seconds."""
    spans = [event for event in _whole_track(timeline, "engine") if event.kind is EventKind.SPAN]
    steps = [event for event in spans if event.name == "step"]
    launches = _inside(steps, [event for event in spans if event.name == "launch"])
    waits = _inside(steps, [event for event in spans if event.name in _WAITS])
    for step in steps:
        if launches.get(step.start_ns):
            yield (step.duration_ns - sum(wait.duration_ns for wait in waits.get(step.start_ns, ()))) / 1e9


def _inside(steps: Sequence[TimelineEvent], events: Sequence[TimelineEvent]) -> dict[int, list[TimelineEvent]]:
    """Groups `events` by the step that contains them. The keys are the steps' start times."""
    found: dict[int, list[TimelineEvent]] = {}
    remaining = iter(sorted(events, key=lambda event: event.start_ns))
    event = next(remaining, None)
    for step in sorted(steps, key=lambda step: step.start_ns):
        while event is not None and event.start_ns < step.end_ns:
            if event.start_ns >= step.start_ns:
                found.setdefault(step.start_ns, []).append(event)
            event = next(remaining, None)
    return found
