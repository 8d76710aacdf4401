"""The contract of streams and events: the only way an engine orders work on a device.

    enqueue ─▶ [piece][piece][record e][piece]      stream A, in order
                                 │
    enqueue ─▶ [piece]──────[wait e][piece]         stream B: its last piece runs after e

A stream has one enqueuer, the engine thread. Events may be asked from any thread.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor

from common.device.errors import PieceFailed, is_of_device
from common.device.graph import GraphRecorder
from common.errors import EngineFault

Work = Callable[[], object]
"""A piece's function; its result is dropped."""

_LOOK_WAIT_S = 0.001
_TOLD_WAIT_S = 0.05  # what nobody told of is seen all the same

OnEvent = Callable[[], None]

OnMilestone = Callable[[int, "Event"], None]
"""Called with the number of each milestone."""

MilestoneWork = Callable[[Sequence[Callable[[], None]]], object]
"""A piece that says how far it is, by calling each of these once, in order. What it returns is dropped."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A piece with figures for its span on the timeline."""

    work: Callable[..., object]
    figures: Mapping[str, int]

    def __call__(self, *arguments: object) -> object:
        return self.work(*arguments)


class Scope:
    """The failure scope of one step: what fails together.

    A piece that raises fails its scope. Later pieces of a failed scope are skipped, on every stream; events recorded in
    it complete in their turn and carry the error. Pieces of other scopes run on, also when they wait for such an event:
    a wait orders, it does not propagate failure.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def error(self) -> BaseException | None:
        """The first failure, or None."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """Record a failure; the first one stays. The traceback's frames release their locals, which may hold device
        memory.
        """
        traceback.clear_frames(error.__traceback__)
        with self._lock:
            if self._error is None:
                self._error = error


class Event(Protocol):
    """A point in a stream's order. Done once all work enqueued there before it has run or been skipped."""

    def is_done(self) -> bool:
        """Never blocks. Once true, always true."""

    def synchronize(self, timeout_s: float) -> None:
        """Block the calling thread until done.

        Raises DeviceTimeout when that takes longer than `timeout_s`; PieceFailed, from `error`, when done with one.
        """

    @property
    def error(self) -> BaseException | None:
        """The error that had failed the event's scope or stream when the event was reached. Valid once done."""

    def seconds_since(self, earlier: Event) -> float:
        """Seconds that the stream took from `earlier`, another event of it, to this one. Valid once both are done."""


def wait_in_order(event: Event, timeout_s: float) -> None:
    """Like `event.synchronize`, for a caller that needs only the order: a failed piece concerns only its own step.

    Raises PieceFailed if the device or the stream failed, and DeviceTimeout.
    """
    try:
        event.synchronize(timeout_s)
    except PieceFailed as failure:
        if failure.is_of_device:
            raise


def raise_if_device_failed(event: Event) -> None:
    """Raises what the device or the stream failed with before `event`, which is done, was reached. Ignores a piece's
    own failure, which concerns its scope.
    """
    if event.error is not None and is_of_device(event.error):
        raise event.error


class StreamKind(Enum):
    """A hint what a stream is for."""

    COMPUTE = auto()
    COPY = auto()
    """Only moves data: on a CPU it uses one thread."""


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far a stream is. Busy for long with the same `num_done`: it hangs, or has much to do.

    `is_busy`: it has something that could run or runs, and does not wait for another stream (a CUDA stream cannot
    tell that). `num_done` grows whenever it gets on: with each operation, on CUDA with the recorded points seen passed.
    `error`: the stream itself has failed, and runs nothing any more.
    """

    name: str
    kind: StreamKind
    is_busy: bool
    num_done: int
    error: BaseException | None = None


class Stream(Protocol):
    """Runs pieces in the order in which they were enqueued."""

    @property
    def name(self) -> str: ...

    def progress(self) -> StreamProgress:
        """Never blocks. For one watcher, on any thread."""

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        """Run `work` after everything enqueued here before. The stream drops its reference once it has run.

        An exception fails `scope`. Without a scope it fails the stream: all its later pieces are skipped and all its
        later events carry the error. Raises StreamClosed on a closed stream.
        """

    def enqueue_with_milestones(
        self,
        work: MilestoneWork,
        num_milestones: int,
        scope: Scope | None = None,
        on_milestone: OnMilestone | None = None,
    ) -> Sequence[Event]:
        """Enqueue a piece of which others need not await the end. Returns the milestones' events, in order.

        One is done once what the piece did (on CUDA: enqueued) before it called the milestone has run; those that it
        never called are done when the piece has ended, failed or been skipped. A failure behind a milestone does not
        show in its event: it shows in the scope.

        `on_milestone`: where pieces' Python runs when they are enqueued, called inside the piece with each milestone
        that it comes to: the caller, who gets the events only when the piece has ended, may give other streams work.
        """

    def record(self, scope: Scope | None = None, name: str = "") -> Event:
        """Mark this point. Work enqueued later is not covered. Errors name the event by `name` and its scope."""

    def wait(self, event: Event) -> None:
        """Later work here runs after `event`, whether it is done with an error or without.

        Does not block the caller, except on a schedule stream of a device whose host memory is its device memory
        (there later work is the caller's own code): then it raises DeviceTimeout at the device's bound.
        """

    def close(self, timeout_s: float) -> None:
        """Let the work enqueued so far finish, then stop. Idempotent.

        Raises DeviceTimeout when it does not finish in time: pieces not begun are dropped and their events complete
        with StreamClosed. A piece that hangs keeps what it references.
        """


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`free_bytes` is what anyone may still take; `held_bytes` what this process holds, if the device counts it."""

    total_bytes: int
    free_bytes: int
    held_bytes: int = 0


class Device(Protocol):
    @property
    def torch_device(self) -> torch.device: ...

    def memory(self) -> DeviceMemory | None:
        """The memory now; waits for the device. None if nobody counts it."""
        return None

    @property
    def schedule_stream(self) -> Stream:
        """The engine thread's own stream. It orders what the engine's code does directly with pieces of other streams,
        so a forward can wait for it.
        """

    def new_stream(self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None) -> Stream:
        """Make a stream. On devices that `tells_of_events`, the stream's thread calls `on_event` after each event it
        reaches or abandons. It must not block or raise.
        """

    def enter_thread(self) -> None:
        """Each thread that uses the device outside of pieces calls this first: its calls of the device's library then
        mean this device.
        """
        return

    def failure_for(self, error: BaseException) -> BaseException:
        """The error to raise for `error`, raised outside of pieces: DeviceLost if the device runs nothing any more,
        else `error` itself.
        """
        return error

    @property
    def tells_of_events(self) -> bool:
        return False

    @property
    def runs_pieces_beside(self) -> bool:
        """Whether a piece's Python runs on a thread of its stream, with which the caller shares the interpreter."""
        return False

    @property
    def graphs(self) -> GraphRecorder | None:
        """Records work for replay; None if the device cannot."""
        return None

    def progress(self) -> Sequence[StreamProgress]:
        """The progress of every stream made by `new_stream`. Never blocks. For one watcher, on any thread."""

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory, pinned where that makes copies asynchronous."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the host, made by the running stream; `tensor` itself if the host's memory is the
        device's. Nobody may write to `tensor` any more. Read the copy after an event recorded later.
        """

    def to_device(self, tensor: Tensor) -> Tensor:
        """A device copy of a host tensor that never shares storage, made on the running stream, without blocking."""

    def close(self, timeout_s: float) -> None:
        """Close every stream within one bound. Raises DeviceTimeout, after all are closed, when one did not finish."""


@contextmanager
def naming_a_lost_device(device: Device) -> Iterator[None]:
    """Wraps code that uses the device outside of pieces. A fault that some library reports in its own words is raised
    as DeviceLost.
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
    """How an engine waits for what its streams do: told by those that tell, else by looking often.

    The engine's thread sets `wake`, streams' threads call `told`, which do nothing before.
    """

    def __init__(self, device: Device) -> None:
        self._tells = device.tells_of_events
        self.wake: Callable[[], None] | None = None

    def told(self) -> None:
        """An OnEvent for streams whose events the engine may wait for."""
        if self.wake is not None:
            self.wake()

    @property
    def wait_s(self) -> float:
        """How long the engine may wait before it checks again."""
        return _TOLD_WAIT_S if self._tells and self.wake is not None else _LOOK_WAIT_S
