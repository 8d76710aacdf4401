"""A prefill engine whose frames all come from the test, and a decode engine that records the reports it gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from common.telemetry.stats import EngineLoad, PoolCounts
from common.wire.handoff import Frame, KvSegment
from decode_service.handoff.transport import TransportReport
from decode_service.messages import CallEnded, FrameArrived, Replica, ReplicasChanged
from prefill_service.messages import (
    BytesSent,
    CallDone,
    CloseCall,
    Command,
    Event,
    FrameReady,
    OpenCall,
    SegmentsReturned,
)
from tests.handoff.samples import SEGMENT_BYTES

BOUND_S = 60.0
ValueT = TypeVar("ValueT")


class Record(Generic[ValueT]):
    """A list of values in the order of arrival. Any thread may append to it and wait on it."""

    def __init__(self) -> None:
        self._values: list[ValueT] = []
        self._changed = threading.Condition()

    def add(self, value: ValueT) -> None:
        with self._changed:
            self._values.append(value)
            self._changed.notify_all()

    def all(self) -> list[ValueT]:
        with self._changed:
            return list(self._values)

    def wait_until(self, holds: Callable[[list[ValueT]], bool]) -> list[ValueT]:
        """Waits until `holds(values)` is True, and returns the values. Raises AssertionError after BOUND_S."""
        with self._changed:
            if not self._changed.wait_for(lambda: holds(self._values), BOUND_S):
                raise AssertionError(
                    f"not within {BOUND_S} s; so far: {[type(value).__name__ for value in self._values]}"
                )
            return list(self._values)


class ScriptedPrefill:
    """A prefill engine (an EnginePort) played by the test. It passes its events to `deliver`."""

    def __init__(self) -> None:
        self.commands: Record[Command] = Record()
        self.deliver: Callable[[Sequence[Event]], None] = lambda events: None
        self.is_alive = True
        empty = PoolCounts(total=8, free=8)
        self.load = EngineLoad(rows=empty, slots=empty, num_queued=0, num_running=0, num_steps=0)

    def post(self, command: Command) -> None:
        self.commands.add(command)

    def emit(self, call_id: str, *frames: Frame) -> None:
        self.deliver([FrameReady(call_id, frame) for frame in frames])

    def finish(self, call_id: str) -> None:
        self.deliver([CallDone(call_id)])

    def opened(self, count: int = 1) -> list[OpenCall]:
        """Waits until `count` calls were opened, and returns the first `count`."""
        commands = self.commands.wait_until(lambda values: len(_of(OpenCall, values)) >= count)
        return _of(OpenCall, commands)[:count]

    def closed(self, call_id: str) -> None:
        """Waits until the call is closed, and asserts that it was closed only once."""
        commands = self.commands.wait_until(lambda values: CloseCall(call_id) in values)
        assert commands.count(CloseCall(call_id)) == 1

    def num_closed(self) -> int:
        return len(_of(CloseCall, self.commands.all()))

    def sent_bytes(self) -> int:
        """Returns the number of bytes of segments that the transport sent, or that were lent and returned. A lent
        segment counts as SEGMENT_BYTES.
        """
        commands = self.commands.all()
        num_returned = sum(len(command.numbers) for command in _of(SegmentsReturned, commands))
        return sum(command.num_bytes for command in _of(BytesSent, commands)) + num_returned * SEGMENT_BYTES


class RecordingDecode:
    """Records what a transport posts to a decode engine."""

    def __init__(self) -> None:
        self.reports: Record[TransportReport] = Record()

    def post(self, report: TransportReport) -> None:
        self.reports.add(report)

    def frames(self, call_id: str, count: int) -> list[Frame]:
        """Waits until `count` frames of the call have come after the initial Accepted, and returns those."""
        reports = self.reports.wait_until(lambda values: len(_frames_of(call_id, values)) > count)
        return _frames_of(call_id, reports)[1:]

    def arrived(self, call_id: str) -> list[Frame]:
        return _frames_of(call_id, self.reports.all())

    def segments(self) -> list[KvSegment]:
        arrived = [report.frame for report in self.reports.all() if isinstance(report, FrameArrived)]
        return [frame for frame in arrived if isinstance(frame, KvSegment)]

    def wait_for_segments(self, count: int) -> None:
        self.reports.wait_until(
            lambda values: sum(isinstance(v, FrameArrived) and isinstance(v.frame, KvSegment) for v in values) >= count
        )

    def ended(self, call_id: str) -> CallEnded:
        """Waits for the end of the call and returns it. Asserts that nothing of the call follows."""
        reports = self.reports.wait_until(
            lambda values: any(isinstance(value, CallEnded) and value.call_id == call_id for value in values)
        )
        mine = [value for value in reports if not isinstance(value, ReplicasChanged) and value.call_id == call_id]
        end = mine[-1]
        assert isinstance(end, CallEnded), "something of the call followed its end"
        assert all(isinstance(value, FrameArrived) for value in mine[:-1])
        return end

    def num_ends(self, call_id: str) -> int:
        return sum(isinstance(value, CallEnded) and value.call_id == call_id for value in self.reports.all())

    def wait_for_replica(self, holds: Callable[[Replica], bool]) -> Replica:
        """Returns the first report on any replica, past or future, for which `holds` is True."""
        reports = self.reports.wait_until(lambda values: any(map(holds, _replicas_in(values))))
        return next(replica for replica in _replicas_in(reports) if holds(replica))

    def latest_replica(self, holds: Callable[[Replica], bool]) -> Replica:
        """Waits until `holds` is True of the latest report on the only replica, and returns that report."""
        reports = self.reports.wait_until(lambda values: bool(_replicas_in(values)) and holds(_replicas_in(values)[-1]))
        return _replicas_in(reports)[-1]


def _of(kind: type[ValueT], values: Sequence[object]) -> list[ValueT]:
    return [value for value in values if isinstance(value, kind)]


def _frames_of(call_id: str, reports: Sequence[TransportReport]) -> list[Frame]:
    return [report.frame for report in _of(FrameArrived, reports) if report.call_id == call_id]


def _replicas_in(reports: Sequence[TransportReport]) -> list[Replica]:
    return [replica for report in _of(ReplicasChanged, reports) for replica in report.replicas]
