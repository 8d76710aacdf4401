"""The CPU as a device. Every stream is a worker thread, so a forgotten wait between streams is a real race."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common.device.piece import close_all, event_name, failure_of, piece_span, raise_failure, run_piece
from common.device.stream import (
    LONGEST_LOOK_S,
    Device,
    DeviceMemory,
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
from common.host.cores import compute, set_own_num_threads
from common.host.memory import available_bytes
from common.telemetry.timeline import Timeline, Track

_ABANDON_POLL_S = 0.1


class CpuEvent(Event):
    """An event of a CpuStream, completed by the stream's thread."""

    def __init__(self, stream_scope: Scope, scope: Scope | None, name: str = "") -> None:
        self._name = name
        self._stream_scope = stream_scope
        self._scope = scope
        self._error: BaseException | None = None
        self._reached_s = 0.0
        self._is_done = False
        self._is_ending = threading.Lock()  # the first thread that completes the event takes it for good; two may try
        self._undone = threading.Lock()  # held until the event is done; about five times cheaper than threading.Event
        self._undone.acquire()

    def is_done(self) -> bool:
        return self._is_done

    def synchronize(self, timeout_s: float) -> None:
        if not self._is_done:
            left_s = max(0.0, timeout_s)
            while not self._undone.acquire(timeout=min(left_s, LONGEST_LOOK_S)):
                left_s -= LONGEST_LOOK_S
                if left_s <= 0.0:
                    event = event_name(self._name, self._scope or self._stream_scope)
                    raise DeviceTimeout(f"stream {self._stream_scope.name} did not reach {event} within {timeout_s} s")
            self._undone.release()  # others may be waiting too
        if self._error is not None:
            raise_failure(self._error, event_name(self._name, self._scope or self._stream_scope))

    @property
    def error(self) -> BaseException | None:
        return self._error

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CpuEvent), "an event of another device"
        return self._reached_s - earlier._reached_s

    def reach(self) -> bool:
        """Completes the event, because the stream has reached it. Returns False if it was completed before.

        The event of a milestone is reached twice: inside the function that reports the milestone, and after it.
        """
        is_first = self._is_ending.acquire(blocking=False)
        if is_first:
            self._end(failure_of(self._scope, self._stream_scope))
        return is_first

    def abandon(self, error: BaseException) -> None:
        """Completes the event with `error`, because the stream will not reach it. No effect on a completed event."""
        if self._is_ending.acquire(blocking=False):
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._reached_s = time.perf_counter()
        self._is_done = True
        self._undone.release()


@dataclass(slots=True)
class _EnqueuedPiece:
    work: Work
    scope: Scope | None


@dataclass(slots=True)
class _EnqueuedWait:
    event: Event


class CpuStream(Stream):
    """A stream that is one daemon thread, which runs the enqueued functions with `num_threads` intra-op threads.

    Each function starts with torch's default grad mode and inference mode, because these are thread-local and not set
    here.
    """

    def __init__(
        self,
        name: str,
        *,
        num_threads: int,
        kind: StreamKind = StreamKind.COMPUTE,
        track: Track | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        """Starts the thread. Each function that it runs, and each wait, is recorded as a span on `track`.

        The thread calls `on_event` after each event that it reaches. `on_event` is also called when the stream ends
        and its queued events are given up.
        """
        self._on_event = on_event
        self._track = track or Track(name)
        self._scope = Scope(name)
        self._kind = kind
        self._num_enqueued = 0  # written only by the enqueuing thread; the next two only by the stream's
        self._num_done = 0
        self._is_waiting = False
        self._queue: queue.SimpleQueue[_EnqueuedPiece | _EnqueuedWait | CpuEvent | None] = queue.SimpleQueue()
        self._is_closed = False
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, args=(num_threads,), name=f"stream-{name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._scope.name

    def progress(self) -> StreamProgress:
        is_busy = self._num_done < self._num_enqueued and not (self._is_waiting or self._is_abandoned)
        return StreamProgress(self.name, self._kind, is_busy, self._num_done, self._scope.error)

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        self._put(_EnqueuedPiece(work, scope))

    def enqueue_with_milestones(
        self,
        work: MilestoneWork,
        num_milestones: int,
        scope: Scope | None = None,
        on_milestone: OnMilestone | None = None,
    ) -> Sequence[Event]:
        events = [CpuEvent(self._scope, scope) for _ in range(num_milestones)]
        self.enqueue(partial(work, [partial(self._reach, event) for event in events]), scope)
        for event in events:
            self._put(event)
        return events

    def record(self, scope: Scope | None = None, name: str = "") -> Event:
        event = CpuEvent(self._scope, scope, name)
        self._put(event)
        return event

    def wait(self, event: Event) -> None:
        if self._is_closed or not event.is_done():
            self._put(_EnqueuedWait(event))

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandon()
            raise DeviceTimeout(f"stream {self.name} did not finish within {timeout_s} s; the rest is dropped")

    def _put(self, operation: _EnqueuedPiece | _EnqueuedWait | CpuEvent) -> None:
        if self._is_closed:
            raise StreamClosed(f"stream {self.name} is closed")
        self._num_enqueued += 1
        self._queue.put(operation)
        if self._is_abandoned:
            self._abandon()

    def _run(self, num_threads: int) -> None:
        try:
            if self._kind is StreamKind.COMPUTE:
                compute()
            set_own_num_threads(num_threads)
            while (operation := self._queue.get()) is not None:
                match operation:
                    case _EnqueuedPiece(work, scope):
                        with piece_span(self._track, work, scope):
                            run_piece(work, scope, self._scope)
                        del work, scope
                    case CpuEvent():
                        self._reach(operation)
                    case _EnqueuedWait(event):
                        if not event.is_done():
                            with self._track.span("wait"):
                                self._block_until_done(event)
                        del event
                self._num_done += 1
                del operation  # or the next get() would keep it alive for as long as the stream is idle
        finally:
            self._abandon()

    def _reach(self, event: CpuEvent) -> None:
        if event.reach() and self._on_event is not None:
            self._on_event()

    def _block_until_done(self, event: Event) -> None:
        """Blocks the stream's thread until `event` is done or this stream is abandoned.

        The event always completes in the end, because a stream completes its events even when it dies.
        """
        self._is_waiting = True
        while not (event.is_done() or self._is_abandoned):
            with contextlib.suppress(DeviceTimeout, PieceFailed):
                event.synchronize(_ABANDON_POLL_S)
        self._is_waiting = False

    def _abandon(self) -> None:
        """Drops queued work and completes queued events with StreamClosed. Any thread may call it, also repeatedly."""
        self._is_abandoned = True
        error = StreamClosed(f"stream {self.name} ended before it reached this work")
        self._scope.fail(error)
        try:
            while True:
                operation = self._queue.get_nowait()
                if isinstance(operation, CpuEvent):
                    operation.abandon(error)
        except queue.Empty:
            self._queue.put(None)
        if self._on_event is not None:
            self._on_event()


class CpuDevice(Device):
    """The CPU as a device, whose streams are threads.

    `num_threads` is the number of threads of each compute stream; streams that compute at the same time compete for the
    cores. `wait_timeout_s` limits how long the schedule stream waits for another stream.
    """

    def __init__(self, *, num_threads: int, wait_timeout_s: float = 60.0, timeline: Timeline | None = None) -> None:
        self._timeline = timeline or Timeline()
        self._num_threads = num_threads
        self._torch_device = torch.device("cpu")
        self._schedule_stream = InlineStream("schedule", wait_timeout_s=wait_timeout_s)
        self._streams: list[CpuStream] = []

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    @property
    def schedule_stream(self) -> Stream:
        return self._schedule_stream

    def memory(self) -> DeviceMemory | None:
        num_bytes = available_bytes()
        return None if num_bytes is None else DeviceMemory(num_bytes, num_bytes)

    @property
    def runs_pieces_beside(self) -> bool:
        return True

    @property
    def tells_of_events(self) -> bool:
        return True

    def new_stream(self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None) -> Stream:
        num_threads = 1 if kind is StreamKind.COPY else self._num_threads
        stream = CpuStream(
            name, num_threads=num_threads, kind=kind, track=self._timeline.track(name), on_event=on_event
        )
        self._streams.append(stream)
        return stream

    def progress(self) -> Sequence[StreamProgress]:
        return [stream.progress() for stream in self._streams]

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def close(self, timeout_s: float) -> None:
        close_all([*self._streams, self._schedule_stream], timeout_s)


class InlineEvent(Event):
    """An event that is done from the start, because all work before it has already run."""

    def __init__(self, name: str, error: BaseException | None) -> None:
        self._name = name
        self._error = error
        self._reached_s = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def synchronize(self, timeout_s: float) -> None:
        raise_failure(self._error, self._name)

    @property
    def error(self) -> BaseException | None:
        return self._error

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, InlineEvent), "an event of another stream"
        return self._reached_s - earlier._reached_s


class InlineStream(Stream):
    """A stream without a thread: `enqueue` runs the work before it returns.

    `wait` blocks the caller for at most `wait_timeout_s`, then raises DeviceTimeout.
    """

    def __init__(self, name: str, *, wait_timeout_s: float) -> None:
        self._scope = Scope(name)
        self._wait_timeout_s = wait_timeout_s
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._scope.name

    def progress(self) -> StreamProgress:
        """Returns the stream's progress, which is never busy: nothing is left to run after `enqueue` returns."""
        return StreamProgress(self.name, StreamKind.COMPUTE, is_busy=False, num_done=0, error=self._scope.error)

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        self._check_open()
        run_piece(work, scope, self._scope)

    def record(self, scope: Scope | None = None, name: str = "") -> Event:
        self._check_open()
        return InlineEvent(event_name(name, scope or self._scope), failure_of(scope, self._scope))

    def wait(self, event: Event) -> None:
        self._check_open()
        with contextlib.suppress(PieceFailed):
            event.synchronize(self._wait_timeout_s)

    def close(self, timeout_s: float) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamClosed(f"stream {self.name} is closed")
