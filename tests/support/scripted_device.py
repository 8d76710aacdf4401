"""A device for tests. Work on its streams runs only when the test, or the device's policy, picks it.

    device = ScriptedDevice(on_synchronize=refuse)
    forward = device.new_stream("forward")
    ...                                  # the code under test enqueues
    forward.pending()                    # ["resolve", "verify", "publish"]
    forward.run_next()                   # "resolve" has run; the code under test may check its events again

The test picks pieces (units of work) only. An event is done, and a wait is passed, as soon as the work before it has
run. Everything happens on the calling thread.

With `runs_pieces_beside=False` the device behaves like CUDA: a piece's Python runs when it is enqueued. The test or the
policy then picks the device's part of the piece, which does nothing, but later events are reached only after it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common.device.cpu import InlineStream
from common.device.piece import close_all, event_name, failure_of, piece_name, raise_failure, run_piece
from common.device.stream import (
    Device,
    DeviceTimeout,
    Event,
    MilestoneWork,
    OnEvent,
    OnMilestone,
    PieceFailed,
    Scope,
    Stream,
    StreamClosed,
    StreamKind,
    StreamProgress,
    Work,
)

Policy = Callable[["ScriptedDevice", Event], None]
"""Called when code blocks on an event. It runs the work that should run now.

If the event is not done afterwards, the blocked code gets a DeviceTimeout.
"""


def run_needed(device: ScriptedDevice, event: Event) -> None:
    """Runs only the work that `event` needs, so that all other work runs as late as possible.

    This is a policy: the device calls it when code blocks on `event`.
    """
    device.run_until(event)


def refuse(device: ScriptedDevice, event: Event) -> None:
    """Runs nothing, so that code that blocks on `event` gets a DeviceTimeout at once. This is a policy."""


def pick_with(choose: Callable[[Sequence[ScriptedStream]], ScriptedStream]) -> Policy:
    """Returns a policy, to be called when code blocks on an event. It runs work until the event is done, or nothing can
    run. Before each piece of work, `choose` gets the streams that can run something, and picks one.
    """

    def pick(device: ScriptedDevice, event: Event) -> None:
        while not event.is_done() and (ready := device.ready_streams()):
            choose(ready).run_next()

    return pick


class NotReady(Exception):
    """The test told a stream to run its next work, but it has none or waits for another stream."""


class ScriptedEvent(Event):
    """An event of a ScriptedStream."""

    def __init__(self, stream: ScriptedStream, scope: Scope | None, stream_scope: Scope, name: str = "") -> None:
        self.stream = stream
        self.name = event_name(name, scope or stream_scope)
        self._scope = scope
        self._stream_scope = stream_scope
        self._is_done = False
        self._reached_s = 0.0
        self._error: BaseException | None = None
        self._error_at_record = None if stream.runs_beside else failure_of(scope, stream_scope)

    def is_done(self) -> bool:
        if self._is_done:
            self.stream.device.observer.seen_done(self)
        return self._is_done

    def synchronize(self, timeout_s: float) -> None:
        self.stream.device.block_on(self)
        self.stream.device.observer.seen_done(self)
        raise_failure(self._error, self.name)

    @property
    def error(self) -> BaseException | None:
        return self._error

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, ScriptedEvent), "an event of another device"
        return self._reached_s - earlier._reached_s

    def reach(self, abandoned: BaseException | None = None) -> None:
        """Completes the event. `abandoned` is the error if the stream will never reach it, else None.

        Does nothing if the event is done already, as a milestone's may be.
        """
        if self._is_done:
            return
        beside = self.stream.runs_beside
        self._error = abandoned or (failure_of(self._scope, self._stream_scope) if beside else self._error_at_record)
        self._reached_s = time.perf_counter()
        self._is_done = True


@dataclass(slots=True)
class _Piece:
    work: Work
    scope: Scope | None


@dataclass(slots=True)
class _Wait:
    event: Event


class ScriptedStream(Stream):
    """A stream whose pieces (units of work) the test runs one by one. `ScriptedDevice.new_stream` makes it."""

    def __init__(self, device: ScriptedDevice, name: str, *, kind: StreamKind = StreamKind.COMPUTE) -> None:
        self.device = device
        self._scope = Scope(name)
        self._kind = kind
        self.runs_beside = device.runs_pieces_beside
        self._num_done = 0
        self._queue: deque[_Piece | _Wait | ScriptedEvent] = deque()
        self._is_running = False
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._scope.name

    def progress(self) -> StreamProgress:
        return StreamProgress(self.name, self._kind, self.is_ready, self._num_done, self._scope.error)

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        if self.runs_beside:
            self._put(_Piece(work, scope))
            return
        if self._is_closed:
            raise StreamClosed(f"stream {self.name} is closed")
        with self.device.observer.launching(self, piece_name(work)):
            run_piece(work, scope, self._scope)
        self._put_launched(work)

    def enqueue_with_milestones(
        self,
        work: MilestoneWork,
        num_milestones: int,
        scope: Scope | None = None,
        on_milestone: OnMilestone | None = None,
    ) -> Sequence[Event]:
        if not self.runs_beside:
            reached: dict[int, Event] = {}

            def reach(number: int) -> None:
                self._put_launched(work)
                event = reached.setdefault(number, self.record(scope))
                if on_milestone is not None:
                    on_milestone(number, event)

            self.enqueue(partial(work, [partial(reach, number) for number in range(num_milestones)]), scope)
            return [reached.get(number) or self.record(scope) for number in range(num_milestones)]
        events = [self._new_event(scope) for _ in range(num_milestones)]
        self.enqueue(partial(work, [partial(self._pass_milestone, event) for event in events]), scope)
        for event in events:
            self._put(event)
        return events

    def record(self, scope: Scope | None = None, name: str = "") -> Event:
        event = self._new_event(scope, name)
        self._put(event)
        self.device.observer.recorded(self, event)
        return event

    def wait(self, event: Event) -> None:
        self._put(_Wait(event))
        self.device.observer.waited(self, event)

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        end = self.record()
        self._is_closed = True
        try:
            with contextlib.suppress(PieceFailed):
                end.synchronize(timeout_s)
        finally:
            self._abandon()

    def pending(self) -> list[str]:
        """Returns the names of the enqueued functions that have not run yet, in order."""
        return [piece_name(operation.work) for operation in self._queue if isinstance(operation, _Piece)]

    @property
    def is_ready(self) -> bool:
        """True if `run_next` would run something, and not raise NotReady."""
        return not self._is_running and bool(self._queue) and isinstance(self._queue[0], _Piece)

    @property
    def blocked_on(self) -> Event | None:
        """The event that this stream waits for now, or None."""
        head = self._queue[0] if self._queue else None
        return head.event if isinstance(head, _Wait) else None

    def run_next(self) -> str:
        """Runs the next enqueued function, or skips it if its scope has failed. Returns its name.

        Raises NotReady if there is none or the stream waits for another stream.
        """
        if not self.is_ready:
            reason = "waits for another stream" if self._queue else "has nothing to run"
            raise NotReady(f"stream {self.name} {reason}")
        piece = self._queue.popleft()
        assert isinstance(piece, _Piece)
        self._is_running = True
        try:
            run_piece(piece.work, piece.scope, self._scope)
        finally:
            self._is_running = False
            self._num_done += 1
            self.device.settle()
        return piece_name(piece.work)

    def run_until(self, event: Event) -> None:
        """Runs work of this stream until `event` is done. Raises NotReady if that needs work of another stream."""
        while not event.is_done():
            self.run_next()

    def run_all(self) -> None:
        """Runs all work of this stream. Raises NotReady if the stream has to wait for work of another stream."""
        while self._queue:
            self.run_next()

    def settle(self) -> bool:
        """Completes the events and waits at the head of the queue, and removes them from it.

        Stops at a function, or at a wait whose event is not done. Returns True if it completed any.
        """
        moved = False
        while self._queue and not self._is_running:
            match self._queue[0]:
                case _Piece():
                    break
                case _Wait(event):
                    if not event.is_done():
                        break
                    self.pass_wait(event)
                case event:
                    event.reach()
            self._queue.popleft()
            self._num_done += 1
            moved = True
        return moved

    def pass_wait(self, event: Event) -> None:
        """Called when the stream passes a wait for `event`. A subclass may override it to record the order."""

    def _new_event(self, scope: Scope | None, name: str = "") -> ScriptedEvent:
        return ScriptedEvent(self, scope, self._scope, name)

    def _put_launched(self, work: Callable[..., object]) -> None:
        def on_device() -> None:
            pass

        on_device.__name__ = piece_name(work)
        self._put(_Piece(on_device, None))

    def _pass_milestone(self, event: ScriptedEvent) -> None:
        event.reach()
        self.device.settle()
        self.device.on_host_call(self.device)

    def _put(self, operation: _Piece | _Wait | ScriptedEvent) -> None:
        if self._is_closed:
            raise StreamClosed(f"stream {self.name} is closed")
        self._queue.append(operation)
        self.device.settle()
        self.device.on_host_call(self.device)

    def _abandon(self) -> None:
        dropped = StreamClosed(f"stream {self.name} ended before it reached this work")
        while self._queue:
            operation = self._queue.popleft()
            if isinstance(operation, ScriptedEvent):
                operation.reach(dropped)
        self.device.settle()


def run_nothing(device: ScriptedDevice) -> None:
    """Does nothing. It is the default of ScriptedDevice's `on_host_call`: no stream runs when code enqueues work."""


class Observer:
    """Is notified of what the code under test does with a device's streams. This base class does nothing."""

    @contextlib.contextmanager
    def launching(self, stream: ScriptedStream, name: str) -> Iterator[None]:
        """Returns a context manager. The device enters it to run the function `name` that code enqueues on `stream`.

        Only used if the device runs functions while they are enqueued, not later (`runs_pieces_beside` is False).
        """
        yield

    def recorded(self, stream: ScriptedStream, event: ScriptedEvent) -> None:
        """Called after `event` was recorded on `stream`."""

    def waited(self, stream: ScriptedStream, event: Event) -> None:
        """Called after `stream` was told to wait for `event`."""

    def seen_done(self, event: ScriptedEvent) -> None:
        """Called when code has asked whether `event` is done, or has waited for it, and it is done."""


class ScriptedDevice(Device):
    """A device for tests, whose streams run only when the test or a policy says so.

    `on_synchronize` is called when code blocks on an event. `on_host_call` is called whenever something was enqueued,
    and when running work reports a milestone: with it a test lets streams progress between any two calls of the code
    under test, as threads would. A stream does not start new work while earlier work on it runs. The test may replace
    both functions at any time.
    """

    def __init__(
        self,
        *,
        on_synchronize: Policy = run_needed,
        on_host_call: Callable[[ScriptedDevice], None] = run_nothing,
        runs_pieces_beside: bool = True,
        observer: Observer | None = None,
    ) -> None:
        self.on_synchronize = on_synchronize
        self.on_host_call = on_host_call
        self.observer = observer or Observer()
        self._runs_pieces_beside = runs_pieces_beside
        self.streams: list[ScriptedStream] = []
        self._torch_device = torch.device("cpu")
        self._schedule_stream: InlineStream | ScriptedStream = (
            InlineStream("schedule", wait_timeout_s=0.0) if runs_pieces_beside else ScriptedStream(self, "schedule")
        )

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    @property
    def schedule_stream(self) -> Stream:
        return self._schedule_stream

    @property
    def runs_pieces_beside(self) -> bool:
        return self._runs_pieces_beside

    def new_stream(
        self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None
    ) -> ScriptedStream:
        stream = ScriptedStream(self, name, kind=kind)
        self.streams.append(stream)
        return stream

    def progress(self) -> Sequence[StreamProgress]:
        return [stream.progress() for stream in self.streams]

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor if self._runs_pieces_beside else tensor.detach().clone()

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def close(self, timeout_s: float) -> None:
        close_all([*self.streams, self._schedule_stream], timeout_s)

    def stream(self, name: str) -> ScriptedStream:
        """Returns the stream that the code under test made with this name."""
        return next(stream for stream in self.streams if stream.name == name)

    def ready_streams(self) -> list[ScriptedStream]:
        """Returns the streams that can run something now, in the order of their creation."""
        return [stream for stream in self.streams if stream.is_ready]

    def run_until(self, event: Event) -> None:
        """Runs only the work that `event` needs, on whichever streams that is."""
        while not event.is_done():
            assert isinstance(event, ScriptedEvent), "an event of another device"
            stream = event.stream
            while (obstacle := stream.blocked_on) is not None:
                assert isinstance(obstacle, ScriptedEvent), "an event of another device"
                stream = obstacle.stream
            stream.run_next()

    def run_all(self) -> None:
        """Runs the work of all streams until none can run. They take turns, with one enqueued function each."""
        while ready := self.ready_streams():
            for stream in ready:
                stream.run_next()

    def settle(self) -> None:
        """Completes all events and waits, on all streams, that do not depend on functions that have not run yet."""
        streams = [*self.streams]
        if isinstance(self._schedule_stream, ScriptedStream):
            streams.append(self._schedule_stream)
        while any(stream.settle() for stream in streams):
            pass

    def block_on(self, event: Event) -> None:
        """Called when code blocks on `event`. Unless it is done, calls the policy `on_synchronize`, which runs work.

        Raises DeviceTimeout if `event` is not done afterwards.
        """
        if not event.is_done():
            self.on_synchronize(self, event)
        if not event.is_done():
            blocked = ", ".join(f"{stream.name}: {stream.pending()}" for stream in self.streams)
            raise DeviceTimeout(
                f"the script left undone what somebody waits for: {getattr(event, 'name', event)}; pending: {blocked}"
            )
