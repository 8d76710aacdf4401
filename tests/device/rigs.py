"""A device of each implementation, and what the contract tests need besides the contract: a way to hold a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from common.device.cpu import CpuDevice
from common.device.cuda import CudaDevice
from common.device.stream import Device, Event, Scope, Stream
from tests.device.fake_cuda import CudaDeviceOnFake, FakeCuda
from tests.support.scripted_device import ScriptedDevice, refuse, run_needed

BOUND_S = 60.0
SOON_S = 0.01
_CUDA_HOLD_CYCLES = 1_000_000_000

AT_ONCE = "at once"
FAKE_CUDA = "fake cuda"
KINDS = ["cpu", "scripted", AT_ONCE, FAKE_CUDA]
if torch.cuda.is_available():
    KINDS.append("cuda")


class Journal:
    """Numbers that pieces write, in the order in which the device runs them. They are kept on the device, since on
    CUDA the order of Python code proves nothing.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self._entries = torch.zeros(64, dtype=torch.int64, device=torch_device)
        self._count = torch.zeros(1, dtype=torch.int64, device=torch_device)
        self._one = torch.ones(1, dtype=torch.int64, device=torch_device)

    def write(self, value: int) -> None:
        self._entries.index_copy_(0, self._count, self._one * value)
        self._count.add_(self._one)

    def piece(self, value: int) -> Callable[[], None]:
        return lambda: self.write(value)

    def read(self) -> list[int]:
        """Returns all numbers written so far. Call it after an event."""
        return self._entries[: int(self._count)].tolist()


@dataclass
class Rig:
    kind: str
    device: Device
    _gates: list[threading.Event] = field(default_factory=list)

    @property
    def journal(self) -> Journal:
        return Journal(self.device.torch_device)

    def hold(self, stream: Stream) -> None:
        """Holds the stream: work enqueued next does not run before `release`. On CUDA it is only delayed, by some
        hundred milliseconds.
        """
        match self.device:
            case ScriptedDevice():
                self.device.on_synchronize = refuse
            case CpuDevice():
                gate = threading.Event()
                self._gates.append(gate)
                stream.enqueue(lambda: _wait(gate))
            case CudaDeviceOnFake(cuda=cuda):
                stream.enqueue(lambda: self._gates.append(cuda.hold()))
            case _:
                stream.enqueue(lambda: torch.cuda._sleep(_CUDA_HOLD_CYCLES))

    def release(self) -> None:
        if isinstance(self.device, ScriptedDevice):
            self.device.on_synchronize = run_needed
        for gate in self._gates:
            gate.set()


def open_rig(kind: str, patch: pytest.MonkeyPatch) -> Rig:
    """Opens a device of this kind. `patch` replaces torch.cuda where the kind needs the fake."""
    devices: dict[str, Callable[[], Device]] = {
        "cpu": lambda: CpuDevice(num_threads=1, wait_timeout_s=BOUND_S),
        "scripted": ScriptedDevice,
        AT_ONCE: lambda: ScriptedDevice(runs_pieces_beside=False),
        FAKE_CUDA: lambda: CudaDeviceOnFake(FakeCuda().patched(patch)),
        "cuda": lambda: CudaDevice(0),
    }
    return Rig(kind, devices[kind]())


def finish(stream: Stream, scope: Scope | None = None) -> Event:
    """Records an event on the stream, waits for it, and returns it."""
    event = stream.record(scope)
    event.synchronize(BOUND_S)
    return event


def boom() -> None:
    raise ValueError("boom")


def _wait(gate: threading.Event) -> None:
    assert gate.wait(BOUND_S)
