"""Records where a service's time goes, as spans on tracks. Spans are kept only while a recording is in progress.

    a track's thread ──span──▶ its ring, which keeps the newest ──stop──▶ Recording

Times are CLOCK_MONOTONIC in ns. Uses the standard library only, because engines import it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from common.errors import RecordingInProgress

EDGE, ENGINE, HANDOFF, REQUESTS, TOKENIZE = "edge", "engine", "handoff", "requests", "tokenize"
"""The names of the tracks that every service has. Each stream has one more track."""
FLOW = "flow"
"""The name of the figure (number) by which spans about the same KV bytes are matched across both services."""


class EventKind(Enum):
    """The kind of an event. The values are those of `TimelineEvent.Kind` in timeline.proto."""

    SPAN = 1
    """Work of a track's thread. Spans of one track nest."""
    TASK = 2
    """Work of an asyncio task, which is interleaved with other tasks. Spans of one `task` nest."""
    COUNTER = 3
    """Figures (numbers by name) that are valid from `start_ns` on."""


class TimelineEvent(NamedTuple):
    kind: EventKind
    name: str
    start_ns: int
    duration_ns: int = 0
    detail: str = ""
    task: str = ""
    figures: Mapping[str, int] = {}

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class DeferredEvent(Protocol):
    """An object that is recorded now and turned into a TimelineEvent after the recording, which makes recording cheap.

    It must not change any more once it is in a Ring.
    """

    def resolve(self) -> TimelineEvent | None:
        """Returns the event, or None if the device has not finished the recorded work, or has failed.

        Call it after the recording, on any thread.
        """


class Ring:
    """The newest events of one track in one recording. One thread writes; appending to a deque is atomic."""

    def __init__(self, max_events: int) -> None:
        self.events: deque[TimelineEvent | DeferredEvent] = deque(maxlen=max_events)
        self.num_added = 0

    def add(self, event: TimelineEvent | DeferredEvent) -> None:
        self.events.append(event)
        self.num_added += 1


class RecordedTrack(NamedTuple):
    """The events of one track. `num_dropped` counts older events that did not fit into the ring."""

    name: str
    events: list[TimelineEvent]
    num_dropped: int


class Recording:
    """The events recorded from `start_ns` to `end_ns`."""

    def __init__(self, rings: dict[str, Ring], start_ns: int, end_ns: int) -> None:
        self._rings = rings
        self.start_ns = start_ns
        self.end_ns = end_ns

    def take_tracks(self) -> list[RecordedTrack]:
        """Returns each track's events in the order in which they ended. Call it once: the rings are released as they
        are read.

        It takes a while if there are many events.
        """
        return [_read(name, self._rings.pop(name), self.end_ns) for name in tuple(self._rings)]


class _NotRecorded:
    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


NOT_RECORDED = _NotRecorded()


class Track:
    """One lane of the timeline, written by one thread. When nothing is recorded, a span costs one check of `ring`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ring: Ring | None = None  # None while there is no recording

    def span(self, name: str, detail: str = "", **figures: int) -> AbstractContextManager[None]:
        """Returns a context that records a span around code of the track's thread. The code must not await.

        `detail` is a text and `figures` are numbers by name, which the timeline shows with the span.
        """
        ring = self.ring
        return NOT_RECORDED if ring is None else _Span(ring, EventKind.SPAN, name, detail, "", figures)

    def task(self, name: str, task: str, **figures: int) -> AbstractContextManager[None]:
        """Returns a context that records a span around code of an asyncio task. The code may await.

        `task` identifies the work that the span belongs to, such as a request id. `figures` are numbers by name.
        """
        ring = self.ring
        return NOT_RECORDED if ring is None else _Span(ring, EventKind.TASK, name, "", task, figures)

    def ended(self, name: str, start_ns: int, detail: str = "", **figures: int) -> None:
        """Records a span that began at `start_ns` and ends now, with figures that are known only at its end."""
        if (ring := self.ring) is not None:
            duration_ns = time.monotonic_ns() - start_ns
            ring.add(TimelineEvent(EventKind.SPAN, name, start_ns, duration_ns, detail, figures=figures))

    def count(self, name: str, **figures: int) -> None:
        if (ring := self.ring) is not None:
            ring.add(TimelineEvent(EventKind.COUNTER, name, time.monotonic_ns(), figures=figures))


class Timeline:
    """The recorder of a service. Tracks are made while the service is built. There is one recording at a time."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}
        self._lock = threading.Lock()
        self._start_ns: int | None = None

    def track(self, name: str) -> Track:
        """Returns the track of this name, which the first call makes. Any thread may call it, but not during a
        recording.
        """
        with self._lock:
            return self._tracks.setdefault(name, Track(name))

    def start(self, *, max_events: int) -> None:
        """Starts a recording that keeps the newest `max_events` of each track. Raises RecordingInProgress if there is
        one already.
        """
        with self._lock:
            if self._start_ns is not None:
                raise RecordingInProgress("the timeline is being recorded for somebody else")
            self._start_ns = time.monotonic_ns()
            for track in self._tracks.values():
                track.ring = Ring(max_events)

    def stop(self) -> Recording:
        """Ends the recording and returns it. Spans that have not ended by now are missing from it."""
        with self._lock:
            assert self._start_ns is not None, "nothing is recorded"
            rings = {track.name: track.ring for track in self._tracks.values() if track.ring is not None}
            for track in self._tracks.values():
                track.ring = None
            recording = Recording(rings, self._start_ns, time.monotonic_ns())
            self._start_ns = None
        return recording


class HasTrack(Protocol):
    track: Track


P = ParamSpec("P")
R = TypeVar("R")
OwnerT = TypeVar("OwnerT", bound=HasTrack)


def recorded(
    name: str,
) -> Callable[[Callable[Concatenate[OwnerT, P], R]], Callable[Concatenate[OwnerT, P], R]]:
    """Returns a decorator for methods that records each call as a span on the `track` of the method's object."""

    def decorate(method: Callable[Concatenate[OwnerT, P], R]) -> Callable[Concatenate[OwnerT, P], R]:
        @functools.wraps(method)
        def call(owner: OwnerT, /, *args: P.args, **options: P.kwargs) -> R:
            if owner.track.ring is None:
                return method(owner, *args, **options)
            with owner.track.span(name):
                return method(owner, *args, **options)

        return call

    return decorate


class _Span:
    """A span that is being recorded. It adds itself to the ring when it ends.

    `resolve` makes it an event after the recording, so that it costs little while the service serves.
    """

    __slots__ = ("_detail", "_duration_ns", "_figures", "_kind", "_name", "_ring", "_start_ns", "_task")

    def __init__(
        self, ring: Ring, kind: EventKind, name: str, detail: str, task: str, figures: Mapping[str, int]
    ) -> None:
        self._ring = ring
        self._kind = kind
        self._name = name
        self._detail = detail
        self._task = task
        self._figures = figures

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._duration_ns = time.monotonic_ns() - self._start_ns
        ring = self._ring
        del self._ring  # the ring will hold this span, so this would be a reference cycle
        ring.add(self)

    def resolve(self) -> TimelineEvent:
        return TimelineEvent(
            self._kind, self._name, self._start_ns, self._duration_ns, self._detail, self._task, self._figures
        )


def _read(name: str, ring: Ring, end_ns: int) -> RecordedTrack:
    """Returns the events of a ring that ended by `end_ns`.

    The track's thread may still be writing: a span that was open at `end_ns` may be added to the ring later, also while
    this function reads it. Such a span is left out.
    """
    kept = list(ring.events.copy())
    resolved = (event if isinstance(event, TimelineEvent) else event.resolve() for event in kept)
    events = [event for event in resolved if event is not None and event.start_ns + event.duration_ns <= end_ns]
    return RecordedTrack(name, events, max(0, ring.num_added - (ring.events.maxlen or 0)))
