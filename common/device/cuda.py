"""Implements the interface of `stream.py` with CUDA. This module imports without CUDA; a CudaDevice needs it.

A piece (a unit of work) runs at once on the calling thread, and puts its kernels on the CUDA stream. An error in its
Python code shows at once. A fault in a kernel is noticed later, when an event is checked or another piece calls CUDA,
and is raised as DeviceLost.

CUDA keeps a current device for each thread, which is device 0 on a new thread. Pieces run with the device of their
stream as the current one. A thread that uses a device outside of pieces calls `enter_thread` first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from common.device.piece import close_all, event_name, failure_of, figures_of, piece_name, raise_failure, run_piece
from common.device.stream import (
    LONGEST_LOOK_S,
    Device,
    DeviceLost,
    DeviceMemory,
    DeviceTimeout,
    Event,
    Graph,
    GraphRecorder,
    GraphWork,
    OnEvent,
    Scope,
    Stream,
    StreamClosed,
    StreamKind,
    StreamProgress,
    Work,
    is_of_device,
)
from common.telemetry.timeline import NOT_RECORDED, EventKind, Ring, Timeline, TimelineEvent, Track

_SPIN_S = 100e-6
_POLL_S = 50e-6
_CLOSING_POLL_S = 500e-6
_NO_FIGURES: Mapping[str, int] = MappingProxyType({})


class CudaEvent(Event):
    """A CUDA event. `synchronize` polls it, because CUDA's own wait has no time limit.

    It polls without pause for the first 100 µs, only releasing the interpreter's lock each time, and then every 50 µs.
    So the caller learns at most 50 µs late that the event is done.
    """

    def __init__(
        self, cuda_event: torch.cuda.Event, name: str, error: BaseException | None, *, stream_name: str = ""
    ) -> None:
        self.cuda_event = cuda_event
        self._name = name
        self._stream_name = stream_name
        self._error = error
        self._is_done = False

    def is_done(self) -> bool:
        if not self._is_done:
            try:
                self._is_done = bool(self.cuda_event.query())
            except RuntimeError as error:
                self._error = _lost(error, f"waiting for {self._name} on stream {self._stream_name}")
                self._is_done = True
        return self._is_done

    def synchronize(self, timeout_s: float) -> None:
        waited_s, looked_s = 0.0, time.monotonic()
        while not self.is_done():
            if waited_s >= timeout_s:
                raise DeviceTimeout(f"stream {self._stream_name} did not reach {self._name} within {timeout_s} s")
            time.sleep(0.0 if waited_s < _SPIN_S else _POLL_S)
            now_s = time.monotonic()
            waited_s += min(now_s - looked_s, LONGEST_LOOK_S)
            looked_s = now_s
        raise_failure(self._error, self._name)

    @property
    def error(self) -> BaseException | None:
        return self._error

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent), "an event of another device"
        return float(earlier.cuda_event.elapsed_time(self.cuda_event)) / 1e3


class CudaStream(Stream):
    """A CUDA stream.

    The caller must keep a reference to each tensor that several streams use until the step's last event is done.
    Torch's allocator assigns each block of memory to one stream, and could reuse it while another still reads it.
    """

    def __init__(
        self,
        name: str,
        cuda_stream: torch.cuda.Stream,
        *,
        kind: StreamKind = StreamKind.COMPUTE,
        track: Track | None = None,
    ) -> None:
        """Wraps `cuda_stream`. Its work and its waits are recorded as spans on `track`."""
        self._timer = _CudaTimer(cuda_stream, track or Track(name))
        self._scope = Scope(name)
        self._kind = kind
        self._cuda_stream = cuda_stream
        self._latest: CudaEvent | None = None
        self._watched: CudaEvent | None = None  # this and the next are written by the thread that calls `progress`
        self._num_passed = 0
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._scope.name

    def progress(self) -> StreamProgress:
        """Returns how far the stream has come. It checks one event until that is done, then the latest recorded one."""
        if self._watched is None or self._watched.is_done():
            self._num_passed += 1
            self._watched = self._latest
        is_busy = self._watched is not None and not self._watched.is_done()
        error = self._scope.error
        if error is None and self._watched is not None and isinstance(self._watched.error, DeviceLost):
            error = self._watched.error
        return StreamProgress(self.name, self._kind, is_busy, self._num_passed, error)

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        self._check_open()
        with torch.cuda.stream(self._cuda_stream):
            if not self._timer.is_recording:
                run_piece(work, scope, self._scope, self._failure_for)
                return
            with self._timer.timed(piece_name(work), "" if scope is None else scope.name, figures_of(work)):
                run_piece(work, scope, self._scope, self._failure_for)

    def record(self, scope: Scope | None = None, name: str = "") -> Event:
        self._check_open()
        return self._record(scope, name)

    def wait(self, event: Event) -> None:
        self._check_open()
        assert isinstance(event, CudaEvent), "an event of another device"
        try:
            with self._timer.timed("wait"):
                self._cuda_stream.wait_event(event.cuda_event)
        except RuntimeError as error:
            self._scope.fail(_lost(error, f"having stream {self.name} wait"))

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        end = self._record(scope=None)
        deadline_s = time.monotonic() + timeout_s
        while not end.is_done():
            if time.monotonic() >= deadline_s:
                raise DeviceTimeout(f"stream {self.name} did not finish within {timeout_s} s")
            time.sleep(_CLOSING_POLL_S)

    def _failure_for(self, error: BaseException) -> BaseException:
        return self.failure_for(error, f"putting work on stream {self.name}")

    def failure_for(self, error: BaseException, doing: str) -> BaseException:
        """Returns DeviceLost if the device has faulted, else `error` itself.

        The fault of a kernel may be raised by any later call, as an exception of PyTorch, cuBLAS or Triton. So this
        method queries the stream, which fails again if the device has faulted. `doing` says, for the error's message,
        what the caller was doing.
        """
        if is_of_device(error):
            return error
        try:
            self._cuda_stream.query()
        except RuntimeError as lost:
            return _lost(lost, doing)
        return error

    def _record(self, scope: Scope | None, name: str = "") -> CudaEvent:
        cuda_event = torch.cuda.Event(enable_timing=True)
        try:
            cuda_event.record(self._cuda_stream)
        except RuntimeError as error:
            self._scope.fail(_lost(error, f"recording on stream {self.name}"))
        error_here = failure_of(scope, self._scope)
        event = CudaEvent(cuda_event, event_name(name, scope or self._scope), error_here, stream_name=self.name)
        self._latest = event
        return event

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamClosed(f"stream {self.name} is closed")


class CudaDevice(Device):
    """One GPU. Its schedule stream is CUDA's default stream, which a thread uses unless it sets another one."""

    def __init__(self, index: int, *, timeline: Timeline | None = None) -> None:
        self._timeline = timeline or Timeline()
        self._index = index
        self._torch_device = torch.device("cuda", index)
        self.enter_thread()
        self._schedule_stream = CudaStream("schedule", torch.cuda.current_stream(self._torch_device))
        self._streams: list[CudaStream] = []
        self._graphs = _CudaGraphRecorder(self._torch_device)

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._index)

    def failure_for(self, error: BaseException) -> BaseException:
        return self._schedule_stream.failure_for(error, "outside of pieces")

    def memory(self) -> DeviceMemory:
        held_bytes = self._graphs.held_bytes()  # releases unused memory first
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._torch_device)
        return DeviceMemory(total_bytes, free_bytes, held_bytes)

    @property
    def schedule_stream(self) -> Stream:
        return self._schedule_stream

    def new_stream(self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None) -> Stream:
        cuda_stream = torch.cuda.Stream(self._torch_device)
        stream = CudaStream(name, cuda_stream, kind=kind, track=self._timeline.track(name))
        self._streams.append(stream)
        return stream

    @property
    def graphs(self) -> GraphRecorder | None:
        return self._graphs

    def progress(self) -> Sequence[StreamProgress]:
        return [stream.progress() for stream in self._streams]

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.cuda.device(self._index):  # the current device pins the memory
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        return self.host_buffer(tensor.shape, tensor.dtype).copy_(tensor.detach(), non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        # pin_memory() keeps strides: for a few slots of a memory-mapped pool it would pin all memory between them too
        staged = self.host_buffer(tensor.shape, tensor.dtype).copy_(tensor.detach())
        return staged.to(self.torch_device, non_blocking=True)

    def close(self, timeout_s: float) -> None:
        close_all([*self._streams, self._schedule_stream], timeout_s)


def _lost(error: RuntimeError, doing: str) -> DeviceLost:
    """Returns a DeviceLost with the first line of CUDA's `error`. The other lines are debugging advice."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    lost = DeviceLost(f"the device faulted, seen {doing}: {reason}")
    lost.__cause__ = error
    return lost


class CudaGraph(Graph):
    """One CUDA graph, whose memory comes from `pool`, a handle of torch's graph memory pools."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        """Records `work` and returns its outputs. Waits for the device, so call it only at start-up.

        Other threads may use the device meanwhile, on other streams.
        """
        stream = torch.cuda.current_stream()  # the stream of the piece that runs this
        graph = torch.cuda.graph(self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with torch.inference_mode(), _without_collection(), graph:
            return work()

    def replay(self) -> None:
        self._graph.replay()


class _CudaGraphRecorder(GraphRecorder):
    """Makes CUDA graphs that share one memory pool.

    Outputs are kept as long as their graph. The next recorded graph reuses the memory of intermediate results.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._pool: Any = None

    def new_graph(self) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self._pool)

    def held_bytes(self) -> int:
        with torch.cuda.device(self._torch_device):
            torch.cuda.empty_cache()  # cached unused memory would be counted as held by graphs
        return torch.cuda.memory_reserved(self._torch_device)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disables Python's garbage collector inside this context: freeing a dead CUDA graph would break a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


class _CudaTimer:
    """Records the work of one CUDA stream as spans on `track`, by events around it, while the timeline is recorded.

    The events are read when the recording is read, without waiting for the device. Only the thread that enqueues on the
    stream calls it. It never raises the device's faults, because the engine's own events report them.
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
