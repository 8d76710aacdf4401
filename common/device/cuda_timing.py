"""Times a CUDA stream's pieces by events around them, which are read with the recording, without waiting."""

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
    """One moment on both clocks, exact to the microseconds in which an idle stream takes up an event."""

    cuda_event: torch.cuda.Event
    at_ns: int

    @classmethod
    def of_now(cls, idle_stream: torch.cuda.Stream) -> _Anchor:
        """A stream that is at work would reach it late."""
        return cls(_recorded_on(idle_stream), time.monotonic_ns())

    def ns_of(self, event: torch.cuda.Event) -> int:
        return self.at_ns + round(float(self.cuda_event.elapsed_time(event)) * 1e6)


@dataclass(frozen=True, slots=True)
class _TimedPiece:
    name: str
    detail: str
    figures: Mapping[str, int]
    anchor: _Anchor
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def resolve(self) -> TimelineEvent | None:
        try:
            if not (self.anchor.cuda_event.query() and self.end.query()):
                return None
            start_ns, end_ns = self.anchor.ns_of(self.begin), self.anchor.ns_of(self.end)
        except RuntimeError:  # the device faulted, which the engine reports
            return None
        return TimelineEvent(EventKind.SPAN, self.name, start_ns, end_ns - start_ns, self.detail, figures=self.figures)


class CudaTimer:
    """Only the stream's enqueuer calls it. Nothing here waits for the device, or raises what the device faulted with:
    the engine hears of that by its own events.
    """

    def __init__(self, cuda_stream: torch.cuda.Stream, track: Track) -> None:
        self._cuda_stream = cuda_stream
        self._idle_stream = torch.cuda.Stream(cuda_stream.device)
        self._track = track
        self._anchored: tuple[Ring, _Anchor] | None = None  # belongs to the ring's recording

    @property
    def is_recording(self) -> bool:
        return self._track.ring is not None

    def timed(
        self, name: str, detail: str = "", figures: Mapping[str, int] = _NO_FIGURES
    ) -> AbstractContextManager[None]:
        """Wraps code that puts work on the stream."""
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
