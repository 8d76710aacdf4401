"""A stand-in for the part of torch.cuda that common/device uses. Work on its streams takes no time unless a test holds
it.

The work itself runs on the CPU at once, like the Python code of a CudaStream's pieces. The fake tracks how far each
stream is, which device is current on each thread, and which device was current at each call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from common.device.cuda import CudaDevice


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.is_recorded = self.is_reached = False

    def record(self, stream: FakeStream) -> None:
        self._cuda.check()
        self.is_recorded = True
        stream.queue.append(self)
        self._cuda.advance()

    def query(self) -> bool:
        self._cuda.check()
        self._cuda.advance()
        return self.is_reached or not self.is_recorded

    def elapsed_time(self, later: FakeEvent) -> float:
        return 0.0


class FakeStream:
    """A fake CUDA stream. Its `queue` holds events to be reached, events to wait for (`wait_event`), and gates that
    stop it.
    """

    def __init__(self, cuda: FakeCuda, device_index: int) -> None:
        self._cuda = cuda
        self.device = torch.device("cuda", device_index)
        self.queue: deque[FakeEvent | _Wait | threading.Event] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.check()
        self.queue.append(_Wait(event))

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self._cuda)
        event.record(other)
        self.wait_event(event)

    def query(self) -> bool:
        self._cuda.check()
        self._cuda.advance()
        return not self.queue

    def advance(self) -> bool:
        """Advances the stream as far as it can go. Returns True if it moved."""
        before = len(self.queue)
        while self.queue:
            match self.queue[0]:
                case FakeEvent() as event:
                    event.is_reached = True
                case _Wait(event) if event.is_reached or not event.is_recorded:
                    pass
                case threading.Event() as gate if gate.is_set():
                    pass
                case _:
                    break
            self.queue.popleft()
        return len(self.queue) < before


@dataclass(frozen=True, slots=True)
class _Wait:
    event: FakeEvent


class _Current(threading.local):
    """The current device and stream of a thread. As in CUDA, a new thread starts with device 0 and its default
    stream.
    """

    def __init__(self) -> None:
        self.device_index = 0
        self.stream: FakeStream | None = None


@dataclass
class FakeCuda:
    """A fake torch.cuda. While `faulted` is not empty, every call fails with it as the message. `asked` lists the
    calls, each with the device that was current.
    """

    num_devices: int = 2
    faulted: str = ""
    asked: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._current = _Current()
        self._default_streams = [FakeStream(self, index) for index in range(self.num_devices)]
        self._streams = [*self._default_streams]

    def patched(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        """Replaces torch.cuda by this fake."""
        for name in ("device_count", "set_device", "current_stream", "stream", "device"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(self))
        patch.setattr(torch.cuda, "Stream", self._new_stream)
        return self

    def check(self) -> None:
        if self.faulted:
            raise torch.AcceleratorError(f"CUDA error: {self.faulted}\nCUDA kernel errors might be reported later")

    def launch(self, library: str = "Triton Error [CUDA]") -> None:
        """Launches a kernel in the way of a library that calls the driver itself, such as Triton. After a fault it
        raises that library's error.
        """
        if self.faulted:
            raise RuntimeError(f"{library}: {self.faulted}")

    def advance(self) -> None:
        while any(stream.advance() for stream in self._streams):
            pass

    @property
    def current_device(self) -> int:
        return self._current.device_index

    def device_count(self) -> int:
        return self.num_devices

    def set_device(self, device: int) -> None:
        assert 0 <= device < self.num_devices
        self._current.device_index = device

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        index = self.current_device if device is None else device.index
        stream = self._current.stream
        return stream if stream is not None and stream.device.index == index else self._default_streams[index]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Makes a stream and its device current within the block, like torch.cuda.stream."""
        current = self._current
        before = (current.device_index, current.stream)
        current.device_index, current.stream = stream.device.index, stream
        try:
            yield
        finally:
            current.device_index, current.stream = before

    @contextlib.contextmanager
    def device(self, device: int | torch.device) -> Iterator[None]:
        before = self._current.device_index
        self._current.device_index = device if isinstance(device, int) else device.index
        try:
            yield
        finally:
            self._current.device_index = before

    def hold(self) -> threading.Event:
        """Holds the current stream. Work enqueued from now on runs only after the returned event is set."""
        gate = threading.Event()
        self.current_stream().queue.append(gate)
        return gate

    def ask(self, what: str) -> None:
        """Notes an operation that acts on the current device."""
        self.asked.append((what, self.current_device))

    def _new_stream(self, device: torch.device) -> FakeStream:
        self._streams.append(FakeStream(self, device.index))
        return self._streams[-1]


class CudaDeviceOnFake(CudaDevice):
    """A CudaDevice on the fake. Its host memory is not pinned."""

    def __init__(self, cuda: FakeCuda, index: int = 1) -> None:
        super().__init__(index)
        self.cuda = cuda

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)
