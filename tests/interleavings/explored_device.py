"""A scripted device on which a chooser picks the next process, the engine's thread or a stream, wherever the choice may
matter.

The engine's thread can be stopped after each call to the device, before and after each poll of an event, and before it
touches memory that streams touch too. A stream runs a piece (one unit of enqueued work) as a whole or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import cast

from common.device.piece import raise_failure
from common.device.stream import Event, MilestoneWork, OnEvent, OnMilestone, Scope, Stream, StreamKind, Work
from tests.interleavings.footprint import HOST, Memory, Shared, Transition, Unit
from tests.interleavings.launch_order import LaunchOrder
from tests.interleavings.races import check_no_races
from tests.support.scripted_device import ScriptedDevice, ScriptedEvent, ScriptedStream


class Abandoned(BaseException):
    """Raised to end a run that the chooser does not want to continue. It is no Exception, so that no code in between
    takes it for a failure.
    """


Chooser = Callable[[Sequence[str]], str]
"""A function that picks the next process among those that can go on. The host (the engine's thread) is the first of
them if it can go on. The function is called once for each transition.
"""


class ExploredEvent(ScriptedEvent):
    def __init__(self, stream: ExploredStream, scope: Scope | None, stream_scope: Scope, name: str) -> None:
        super().__init__(stream, scope, stream_scope, name)
        self.units: set[Unit] = set(stream.progress_units)
        self.after: set[int] = set()

    def is_done(self) -> bool:
        device = cast(ExploredStream, self.stream).explored
        if not device.is_host_running:
            return self._is_done
        device.point()
        device.current.footprint.reads |= self.units
        answer = self._is_done
        device.point()
        if answer:
            device.current.after |= self.after
            device.observer.seen_done(self)
        return answer

    def synchronize(self, timeout_s: float) -> None:
        device = cast(ExploredStream, self.stream).explored
        device.block_on(self)
        device.current.after |= self.after
        device.observer.seen_done(self)
        raise_failure(self._error, self.name)

    def reach(self, abandoned: BaseException | None = None) -> None:
        if self._is_done:
            return
        stream = cast(ExploredStream, self.stream)
        self.after = {*stream.passed, *stream.last, stream.explored.num_current}
        super().reach(abandoned)


class ExploredStream(ScriptedStream):
    def __init__(self, device: ExploredDevice, name: str) -> None:
        super().__init__(device, name)
        self.explored = device
        self.progress_units: set[Unit] = set()  # units written when everything enqueued so far has run
        self.passed: set[int] = set()  # transitions that the waits passed since the last piece waited for
        self.last: tuple[int, ...] = ()  # the transition of the last piece that ran
        self._num_enqueued = 0
        self._num_run = 0
        self._enqueued_by: list[int] = []

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        if self.runs_beside:
            self._note_enqueued()
        super().enqueue(work, scope)

    def _put_launched(self, work: Callable[..., object]) -> None:
        self._note_enqueued()
        super()._put_launched(work)

    def _note_enqueued(self) -> None:
        self._num_enqueued += 1
        self._enqueued_by.append(self.explored.num_current)
        self.progress_units = {(self.name, "progress", self._num_enqueued)}

    def enqueue_with_milestones(
        self,
        work: MilestoneWork,
        num_milestones: int,
        scope: Scope | None = None,
        on_milestone: OnMilestone | None = None,
    ) -> Sequence[Event]:
        """Enqueues one piece with milestones. On a stream that runs pieces in the background, the explorer treats a
        piece as one step, so all its milestones are passed together with it.
        """
        events = super().enqueue_with_milestones(work, num_milestones, scope, on_milestone)
        if self.runs_beside:
            for event in events:
                cast(ExploredEvent, event).units = set(self.progress_units)
        return events

    def _new_event(self, scope: Scope | None, name: str = "") -> ExploredEvent:
        return ExploredEvent(self, scope, self._scope, name)

    def wait(self, event: Event) -> None:
        if isinstance(event, ExploredEvent):
            self.progress_units = self.progress_units | event.units
        super().wait(event)

    def pass_wait(self, event: Event) -> None:
        if isinstance(event, ExploredEvent):
            self.passed |= event.after

    def begin_piece(self) -> None:
        """Makes this stream's next piece the current transition."""
        device = self.explored
        device.current.name = self.pending()[0]
        device.current.after |= {self._enqueued_by[self._num_run], *self.passed}
        device.current.footprint.writes.add((self.name, "progress", self._num_run + 1))
        self._num_run += 1
        self.passed = set()
        self.last = (device.num_current,)


class ExploredDevice(ScriptedDevice):
    """A device that calls `choose` at every point where the order may matter. `trace` holds the transitions so far; the
    last one is still going on.
    """

    def __init__(self, choose: Chooser) -> None:
        super().__init__(on_host_call=lambda device: self.point())
        self._choose = choose
        self.trace = [Transition(HOST, "begin", (HOST,))]
        self.is_host_running = True
        self._num_of_process = {HOST: 1}
        self._memory = Memory(lambda: self.current.footprint, self._owner)
        self._memory.on_shared = self._on_shared
        self._memory.reads_shadows = lambda: self.is_host_running
        self._schedule: ExploredStream | None = None
        self._is_watching = False
        self.launch_order: LaunchOrder | None = None
        self.witnessed: set[str] = set()
        """Observations that this run made, and that a test demands of some order of a scenario, not of each."""

    @property
    def current(self) -> Transition:
        return self.trace[-1]

    @property
    def num_current(self) -> int:
        return len(self.trace) - 1

    @property
    def schedule_stream(self) -> Stream:
        return self._schedule or super().schedule_stream

    def lag_schedule_side(self) -> None:
        """Makes the schedule side a stream, as on a GPU: the host's writes to shared memory happen later, and its reads
        of that memory wait for them.
        """
        self._schedule = ExploredStream(self, "schedule")
        self.streams.append(self._schedule)

    def run_pieces_at_once(self) -> None:
        """Makes the device behave as a GPU: a piece's Python code runs when it is enqueued.

        The chooser still picks streams, which decides how far the device has come. `launch_order` records what each
        stream touches, and in which order.
        """
        self._runs_pieces_beside = False
        self.launch_order = self.observer = LaunchOrder()
        self._schedule_stream = ScriptedStream(self, "schedule")

    def new_outside_stream(self, name: str) -> ScriptedStream:
        """Adds a stream that is not part of the device, such as a client. Its pieces run when they are chosen."""
        stream = self.new_stream(name)
        stream.runs_beside = True
        return stream

    def new_stream(
        self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None
    ) -> ScriptedStream:
        assert name not in [stream.name for stream in self.streams], f"{name}: streams are told apart by name"
        stream = ExploredStream(self, name)
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def exploring(self, buffers: Iterable[Shared]) -> Iterator[None]:
        """Asks the chooser within the block, and records accesses to `buffers` unit by unit.

        At the end it runs all enqueued work: the explorer must know everything that could have come earlier.
        """
        if self.launch_order is not None:
            self._is_watching = True
            try:
                with self.launch_order.watching(buffers):
                    yield
                    while self._ready_names():
                        self._turn(is_host_enabled=False)
            finally:
                self._is_watching = False
            return
        for buffer in buffers:
            self._memory.name(buffer.tensor, buffer.name, unit_dim=buffer.unit_dim)
            if self._schedule is not None and buffer.is_written_by_host_alone:
                self._memory.shadow(buffer.tensor)
        self._is_watching = True
        try:
            with self._memory.watching():
                yield
                while self._ready_names():
                    self._turn(is_host_enabled=False)
        finally:
            self._is_watching = False

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        """Stops the recording of accesses within the block. A test uses it for its own computations on the engine's
        thread.
        """
        return self._memory.paused() if self.launch_order is None else self.launch_order.unwatched()

    def check_no_races(self) -> None:
        """Raises AssertionError if two accesses to the same memory may happen in either order."""
        if self.launch_order is None:
            check_no_races(self.trace)
        else:
            self.launch_order.check()

    def point(self) -> None:
        """Marks a point at which the host may be stopped. Streams run until the host is chosen."""
        if not (self._is_watching and self.is_host_running):
            return
        while self._turn(is_host_enabled=True) != HOST:
            pass

    def idle(self) -> None:
        """Runs one stream, if any can go on. Called when the host has nothing to do. The host may be stopped again
        after that.
        """
        if self._is_watching and self._ready_names():
            self._turn(is_host_enabled=False)
            self.point()

    def settle(self) -> None:
        was_host_running, self.is_host_running = self.is_host_running, False
        try:
            super().settle()
        finally:
            self.is_host_running = was_host_running

    def block_on(self, event: Event) -> None:
        if not self._is_watching or not self.is_host_running:
            super().block_on(event)
            return
        assert isinstance(event, ExploredEvent)
        while not event._is_done:
            assert self._ready_names(), "the host waits for an event that nothing leads to"
            self._turn(is_host_enabled=False)
        self.point()

    def _turn(self, *, is_host_enabled: bool) -> str:
        enabled = ((HOST,) if is_host_enabled else ()) + tuple(self._ready_names())
        process = self._choose(enabled) if len(enabled) > 1 else enabled[0]
        self._num_of_process[process] = self._num_of_process.get(process, 0) + 1
        self.trace.append(Transition(process, HOST, enabled))
        if process != HOST:
            stream = self.stream(process)
            assert isinstance(stream, ExploredStream)
            self.is_host_running = False
            try:
                stream.begin_piece()
                stream.run_next()
            finally:
                self.is_host_running = True
        return process

    def _ready_names(self) -> list[str]:
        return [stream.name for stream in self.ready_streams()]

    def _owner(self) -> Hashable:
        process = self.current.process
        return (process, self._num_of_process[process])

    def _on_shared(self, operation: Callable[[], object], writes: bool) -> bool:
        if not self.is_host_running:
            return False
        if self._schedule is None:
            self.point()
        elif writes:

            def schedule_side() -> None:
                operation()

            self._schedule.enqueue(schedule_side)
            return True
        else:
            self._schedule.record().synchronize(0.0)
        return False
