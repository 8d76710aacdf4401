"""Times the pieces (units of work) of a CUDA stream with CUDA events around them.

The events are read when the timeline's recording is read, without waiting for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType

import torch

from common.telemetry.timeline import NOT_RECORDED, EventKind, Ring, TimelineEvent, Track

_NO_FIGURES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Anchor:
    """The same moment on the device's clock (an event) and on the host's, exact to a few microseconds.

    It converts times of CUDA events to times of the host.
    """

    cuda_event: torch.cuda.Event
    at_ns: int

    @classmethod
    def of_now(cls, idle_stream: torch.cuda.Stream) -> _Anchor:
        """Returns an anchor for the present moment. The stream must be idle: a busy one would reach the event late."""
        return cls(_recorded_on(idle_stream), time.monotonic_ns())

    def ns_of(self, event: torch.cuda.Event) -> int:
        """Returns the time of `event` on the host's monotonic clock, in nanoseconds."""
        return self.at_ns + round(float(self.cuda_event.elapsed_time(event)) * 1e6)


@dataclass(frozen=True, slots=True)
class _TimedPiece:
    """A unit of work with the CUDA events recorded before and after it. It becomes a span of the timeline."""

    name: str
    detail: str
    figures: Mapping[str, int]
    anchor: _Anchor
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def resolve(self) -> TimelineEvent | None:
        """Returns the span of the work, or None if it has not ended or the device faulted."""
        try:
            if not (self.anchor.cuda_event.query() and self.end.query()):
                return None
            start_ns, end_ns = self.anchor.ns_of(self.begin), self.anchor.ns_of(self.end)
        except RuntimeError:  # the device faulted, which the engine reports
            return None
        return TimelineEvent(EventKind.SPAN, self.name, start_ns, end_ns - start_ns, self.detail, figures=self.figures)


class CudaTimer:
    """Records the work of one CUDA stream as spans on `track`, while the timeline is recorded.

    Only the thread that enqueues on the stream calls it. It never waits for the device, and never raises the device's
    faults, because the engine's own events report them.
    """

    def __init__(self, cuda_stream: torch.cuda.Stream, track: Track) -> None:
        self._cuda_stream = cuda_stream
        self._idle_stream = torch.cuda.Stream(cuda_stream.device)
        self._track = track
        self._anchored: tuple[Ring, _Anchor] | None = None  # the ring identifies the recording that the anchor is for

    @property
    def is_recording(self) -> bool:
        return self._track.ring is not None

    def timed(
        self, name: str, detail: str = "", figures: Mapping[str, int] = _NO_FIGURES
    ) -> AbstractContextManager[None]:
        """Returns a context manager for code that puts work on the stream. It records the work as the span `name`.

        The timeline shows `detail`, a text, and `figures`, numbers by name, with the span. Records nothing while the
        timeline is not recorded.
        """
        ring = self._track.ring
        return NOT_RECORDED if ring is None else self._between_events(ring, name, detail, figures)

    @contextmanager
    def _between_events(self, ring: Ring, name: str, detail: str, figures: Mapping[str, int]) -> Iterator[None]:
        begun: tuple[_Anchor, torch.cuda.Event] | None = None
        with suppress(RuntimeError):
            begun = (self._anchor(ring), _recorded_on(self._cuda_stream))
        yield
        if begun is not None:
            with suppress(RuntimeError):
                ring.add(_TimedPiece(name, detail, figures, *begun, _recorded_on(self._cuda_stream)))

    def _anchor(self, ring: Ring) -> _Anchor:
        if self._anchored is None or self._anchored[0] is not ring:
            self._anchored = (ring, _Anchor.of_now(self._idle_stream))
        return self._anchored[1]


def _recorded_on(cuda_stream: torch.cuda.Stream) -> torch.cuda.Event:
    cuda_event = torch.cuda.Event(enable_timing=True)
    cuda_event.record(cuda_stream)
    return cuda_event
