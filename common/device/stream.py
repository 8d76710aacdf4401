"""The interface of streams, events and recorded work, with which an engine orders all work on a device.

    enqueue ─▶ [piece][piece][record e][piece]      stream A, in order
                                 │
    enqueue ─▶ [piece]──────[wait e][piece]         stream B: its last piece runs after e

A piece is a unit of work: a function that runs on the stream. Only the engine thread enqueues on a stream. Any thread
may check or await an event. A request that is affected by an error of a device or stream ends with an EngineFault:

EngineFault
├── DeviceTimeout     an event or a stream did not finish within its bound
├── PieceFailed       a piece raised; its exception is the cause
├── StreamClosed      the stream was closed, or died, before it reached this work
└── DeviceLost        the device faulted and runs nothing any more
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from common.errors import EngineFault

T = TypeVar("T")
LONGEST_LOOK_S = 1.0
"""The most seconds that one look counts towards a time limit. So nobody is taken for lost when the process or its
machine was suspended.
"""
_EMPTY = object()
_LOOK_WAIT_S = 0.001
_QUEUED_WAIT_S = 0.05
_IDLE_WAIT_S = 0.5
_TOLD_WAIT_S = 0.05  # not endless: events without a notification are seen by polling


class DeviceTimeout(EngineFault):
    """An event or a stream did not finish in time. The work may still be running; event and stream stay usable."""


class PieceFailed(EngineFault):
    """A piece has failed. The exception that it raised is the `__cause__`."""

    @property
    def is_of_device(self) -> bool:
        """True if the device or the stream itself failed, so that no later work on it can succeed either."""
        return is_of_device(self.__cause__)


class StreamClosed(EngineFault):
    """The stream was closed, or its thread ended, before it reached this work."""


class DeviceLost(EngineFault):
    """The device faulted and runs nothing any more."""


def is_of_device(error: BaseException | None) -> bool:
    """Returns True if `error` means that the whole device or stream failed, not only one piece of work."""
    return isinstance(error, DeviceLost | StreamClosed)


Work = Callable[[], object]
"""The function of a piece (a unit of work on a stream). Its result is dropped."""


OnEvent = Callable[[], None]
"""Called by a stream's thread after each event that it reaches or abandons."""

OnMilestone = Callable[[int, "Event"], None]
"""Called with the number and the event of each milestone that work on a stream has reached."""

MilestoneWork = Callable[[Sequence[Callable[[], None]]], object]
"""Work on a stream that reports its progress at points called milestones.

The function gets one callable for each milestone, and calls each once, in order. Its result is dropped.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """A function to run on a stream, with figures (name to number) that the timeline shows with its span."""

    work: Callable[..., object]
    figures: Mapping[str, int]

    def __call__(self, *arguments: object) -> object:
        return self.work(*arguments)


class Scope:
    """A group of pieces (units of work on streams) that fail together, usually those of one engine step.

    A piece that raises fails its scope. Later pieces of a failed scope are skipped, on every stream. Events recorded in
    the scope still complete in order, and carry the error. Pieces of other scopes run on, even if they wait for such an
    event: a wait sets the order and does not propagate the failure.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def error(self) -> BaseException | None:
        """The first failure of the scope, or None if it has not failed."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """Records a failure, unless the scope has failed before.

        Clears the local variables in the traceback's frames, because they may hold device memory.
        """
        traceback.clear_frames(error.__traceback__)
        with self._lock:
            if self._error is None:
                self._error = error


class Event(Protocol):
    """A point in a stream's order of work. It is done once all earlier work of the stream has run or been skipped."""

    def is_done(self) -> bool:
        """Returns whether the stream has reached the event. Never blocks. Once True, it stays True."""

    def synchronize(self, timeout_s: float) -> None:
        """Blocks the calling thread until the event is done.

        Raises DeviceTimeout if that takes longer than `timeout_s`. A time in which the process was stopped counts as
        LONGEST_LOOK_S at most. Raises PieceFailed, with `error` as its cause, if the event carries an error.
        """

    @property
    def error(self) -> BaseException | None:
        """The error of the event's scope or stream at the time the event was reached, or None. Valid once done."""

    def seconds_since(self, earlier: Event) -> float:
        """Returns the seconds between `earlier`, another event of the same stream, and this one. Both must be done."""


class _NotYet:
    error: BaseException | None = None

    def is_done(self) -> bool:
        return False

    def synchronize(self, timeout_s: float) -> None:
        raise AssertionError("nothing waits for work that is not enqueued yet")

    def seconds_since(self, earlier: Event) -> float:
        raise AssertionError("the work is not enqueued yet")


NOT_YET: Event = _NotYet()
"""An event that is never done. It stands for the end of work that is still being enqueued."""


def wait_in_order(event: Event, timeout_s: float) -> None:
    """Blocks until `event` is done. Ignores the failure of a single piece of work, because it concerns only its step.

    Raises PieceFailed if the device or the stream failed, and DeviceTimeout after `timeout_s`.
    """
    try:
        event.synchronize(timeout_s)
    except PieceFailed as failure:
        if failure.is_of_device:
            raise


def raise_if_device_failed(event: Event) -> None:
    """Raises the error of `event` if the device or the stream failed. The event must be done.

    The failure of one piece of work is ignored, because it concerns only its own step.
    """
    if event.error is not None and is_of_device(event.error):
        raise event.error


class StreamKind(Enum):
    """The kind of work a stream is meant for. A device may use it as a hint."""

    COMPUTE = auto()
    COPY = auto()
    """The stream only moves data. On a CPU it uses one thread."""


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far a stream has come. A stream may hang if it stays busy for long and `num_done` does not change.

    `is_busy` is True if work runs or could run now. It is False while the stream waits for another one, except on CUDA,
    which cannot tell the difference. `num_done` counts finished operations; on CUDA it grows when `Stream.progress`
    finds that the event it watches is done. `error` is set if the stream itself has failed and runs nothing any more.
    """

    name: str
    kind: StreamKind
    is_busy: bool
    num_done: int
    error: BaseException | None = None


class Stream(Protocol):
    """Runs pieces (units of work) in the order in which they were enqueued."""

    @property
    def name(self) -> str: ...

    def progress(self) -> StreamProgress:
        """Returns how far the stream has come. Never blocks. Always call it from the same thread, which may be any."""

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        """Runs `work` after everything that was enqueued on this stream before, and then drops the stream's reference
        to `work`.

        If `work` raises, its scope fails. Without a scope the stream fails: its later work is skipped, and its later
        events carry the error. Raises StreamClosed if the stream is closed.
        """

    def enqueue_with_milestones(
        self,
        work: MilestoneWork,
        num_milestones: int,
        scope: Scope | None = None,
        on_milestone: OnMilestone | None = None,
    ) -> Sequence[Event]:
        """Enqueues `work`, which reports milestones on its way. Returns one event for each milestone, in order.

        Another stream can wait for a milestone's event instead of the end of `work`. The event is done once everything
        that `work` did (on CUDA: enqueued) before it reported the milestone has run. If `work` never reports it, the
        event is done when `work` has ended, failed or been skipped. A failure after a milestone shows in the scope, not
        in the milestone's event.

        On devices that run `work` while it is enqueued, which this default is for, `on_milestone` is called when `work`
        reports a milestone. There this method returns the events only after `work` has ended; with `on_milestone` the
        caller can give other streams work earlier.
        """
        reached: dict[int, Event] = {}

        def reach(number: int) -> None:
            event = reached.setdefault(number, self.record(scope))
            if on_milestone is not None:
                on_milestone(number, event)

        self.enqueue(partial(work, [partial(reach, number) for number in range(num_milestones)]), scope)
        return [reached.get(number) or self.record(scope) for number in range(num_milestones)]

    def record(self, scope: Scope | None = None, name: str = "") -> Event:
        """Returns an event that is done when all work enqueued so far has run. Errors mention `name` and the scope."""

    def wait(self, event: Event) -> None:
        """Makes later work of this stream run after `event`, whether the event carries an error or not.

        Does not block the caller, with one exception: a CPU's schedule stream, whose work is the caller's own code,
        blocks, and raises DeviceTimeout after the device's time limit.
        """

    def close(self, timeout_s: float) -> None:
        """Lets the work enqueued so far finish, then stops the stream. A second call does nothing.

        Raises DeviceTimeout if the work does not finish within `timeout_s`. Work that hangs keeps its references. Work
        that has not begun is dropped then, and its events complete with StreamClosed; on CUDA it stays enqueued.
        """


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device. `free_bytes` can still be allocated, by any process.

    `held_bytes` is allocated by this process; 0 if the device does not count it.
    """

    total_bytes: int
    free_bytes: int
    held_bytes: int = 0


class Device(Protocol):
    """A CPU or GPU: makes streams, copies tensors, and reports its memory."""

    @property
    def torch_device(self) -> torch.device: ...

    def memory(self) -> DeviceMemory | None:
        """Returns the present memory of the device, or None if it is not known. Waits for the device."""
        return None

    @property
    def schedule_stream(self) -> Stream:
        """The stream of the work that the engine thread does directly, without `enqueue`.

        Other streams can wait for its events, for example a forward that needs a tensor made by the engine thread.
        """

    def new_stream(self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None) -> Stream:
        """Makes a stream.

        If `tells_of_events` is True, the stream's thread calls `on_event` after each event that it reaches or abandons.
        `on_event` must not block or raise.
        """

    def enter_thread(self) -> None:
        """Makes this the current device of the calling thread.

        A thread that uses the device directly, not through `Stream.enqueue`, calls this first.
        """
        return

    def failure_for(self, error: BaseException) -> BaseException:
        """Returns DeviceLost if the device runs nothing any more, else `error` itself.

        Call it with an error that was raised by code that uses the device directly, not through `Stream.enqueue`.
        """
        return error

    @property
    def tells_of_events(self) -> bool:
        """True if streams call `on_event`. If False, the engine has to poll events."""
        return False

    @property
    def runs_pieces_beside(self) -> bool:
        """True if enqueued functions run on the stream's own thread; False if on the thread that enqueues them."""
        return False

    @property
    def graphs(self) -> GraphRecorder | None:
        """The recorder of graphs (device work that is recorded and replayed), or None if the device has none."""
        return None

    def progress(self) -> Sequence[StreamProgress]:
        """Returns the progress of every stream that `new_stream` made. Never blocks. Always call it from one thread."""

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialised host memory, pinned if the device needs that for asynchronous copies."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Returns a copy of `tensor` on the host, or `tensor` itself if the device is a CPU.

        The copy is work of the stream whose piece calls this, or of the schedule stream outside of pieces. Read it
        only after an event that was recorded on that stream later is done. Do not write to `tensor` any more.
        """

    def to_device(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a host tensor on the device. It never shares storage with the tensor.

        The copy is work of the stream whose piece calls this, or of the schedule stream outside of pieces. It does not
        block the caller.
        """

    def close(self, timeout_s: float) -> None:
        """Closes every stream within `timeout_s` in total. If one did not finish, raises DeviceTimeout at the end."""


@contextmanager
def naming_a_lost_device(device: Device) -> Iterator[None]:
    """Wraps code that uses the device directly, and raises a fault of the device as DeviceLost.

    Without it the fault would be raised as an exception of the library that noticed it. Work that was enqueued on a
    stream does not need this.
    """
    try:
        yield
    except EngineFault:
        raise
    except Exception as error:
        if (failure := device.failure_for(error)) is not error:
            raise failure from error
        raise


class WakeUp:
    """Lets an engine's thread wait for events of its streams: either the streams wake it, or it polls often.

    `wake`, a function that wakes that thread, is set before the thread starts. Threads of streams call `told`, which
    calls `wake`.
    """

    def __init__(self, device: Device) -> None:
        self._tells = device.tells_of_events
        self.wake: Callable[[], None] | None = None

    def told(self) -> None:
        """Wakes the engine. Pass this as `on_event` to streams whose events the engine may wait for."""
        if self.wake is not None:
            self.wake()

    def idle_wait_s(self, *, has_work: bool, awaits_device: bool, has_queued: bool) -> float:
        """Returns for how many seconds an engine waits for commands before its next step.

        That is 0 if it has work to launch or to take. While it waits for the device, it is woken or polls often. With
        queued requests it waits briefly: they may start, or be overdue, without a command.
        """
        if has_work:
            return 0.0
        if awaits_device:
            return _TOLD_WAIT_S if self._tells and self.wake is not None else _LOOK_WAIT_S
        return _QUEUED_WAIT_S if has_queued else _IDLE_WAIT_S


class Cell(Generic[T]):
    """A value that one piece (a unit of work on a stream), or the engine's thread, sets once and later pieces read.

    Another thread may read it too, after it has seen an event done that was recorded on the stream after that piece. If
    the piece fails, later pieces of the same failure scope are skipped, so none of them reads an empty cell.
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: object = _EMPTY

    @property
    def is_set(self) -> bool:
        return self._value is not _EMPTY

    def set(self, value: T) -> None:
        assert self._value is _EMPTY, "the cell is set already"
        self._value = value

    def get(self) -> T:
        assert self._value is not _EMPTY, "the cell is read before the piece that sets it: a fence is missing"
        return cast(T, self._value)


GraphWork = Callable[[], tuple[Tensor, ...]]
"""A function whose device work can be recorded. Returns the output tensors.

It must do the same work on the same memory in each call, and copy nothing from the host.
"""


class Graph(Protocol):
    """Device work recorded once and replayed as a whole.

    Record and replay it inside pieces (units of work) of one stream, and only after the same work has run there once
    without recording, so that everything it needs is compiled.
    """

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        """Records `work` and returns its outputs, which every replay overwrites.

        Later graphs do not use the outputs' memory, but earlier graphs may. So outputs are valid until this graph, or
        one recorded before it, is replayed.
        """

    def replay(self) -> None:
        """Does the recorded work again, with the present contents of its input memory."""


class GraphRecorder(Protocol):
    """Makes graphs that are replayed one after the other on one stream.

    The graphs share the memory of their intermediate results.
    """

    def new_graph(self) -> Graph: ...

    def held_bytes(self) -> int:
        """Releases unused device memory, and returns how many bytes this process still holds. Waits for the device."""
