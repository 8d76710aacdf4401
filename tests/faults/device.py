"""Injects faults into a device: streams that stall, pieces (units of stream work) that raise, and memory that runs
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch
from torch import Tensor

from common.device.piece import piece_name
from common.device.stream import (
    Device,
    DeviceMemory,
    Event,
    MilestoneWork,
    OnEvent,
    OnMilestone,
    Scope,
    Stream,
    StreamKind,
    StreamProgress,
    Work,
)
from tests.faults.injector import InjectedFault, Injector
from tests.faults.plan import Action

P = ParamSpec("P")
HOST_MEMORY = "memory.host"


class FaultyStream(Stream):
    def __init__(self, stream: Stream, injector: Injector) -> None:
        self._stream = stream
        self._injector = injector

    @property
    def name(self) -> str:
        return self._stream.name

    def progress(self) -> StreamProgress:
        return self._stream.progress()

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        self._stream.enqueue(self._with_faults(work), scope)

    def enqueue_with_milestones(
        self,
        work: MilestoneWork,
        num_milestones: int,
        scope: Scope | None = None,
        on_milestone: OnMilestone | None = None,
    ) -> Sequence[Event]:
        return self._stream.enqueue_with_milestones(self._with_faults(work), num_milestones, scope, on_milestone)

    def record(self, scope: Scope | None = None, name: str = "") -> Event:
        return self._stream.record(scope, name)

    def wait(self, event: Event) -> None:
        self._stream.wait(event)

    def close(self, timeout_s: float) -> None:
        self._stream.close(timeout_s)

    def _with_faults(self, work: Callable[P, object]) -> Callable[P, object]:
        points = (f"stream.{self.name}", f"stream.{self.name}.{piece_name(work)}")
        if not any(map(self._injector.watches, points)):
            return work

        def piece(*arguments: P.args, **keywords: P.kwargs) -> None:
            for point in points:
                self._visit(point)
            work(*arguments, **keywords)

        piece.__name__ = piece_name(work)
        return piece

    def _visit(self, point: str) -> None:
        fault = self._injector.visit(point)
        if fault is None:
            return
        if fault.action is Action.STALL:
            time.sleep(fault.seconds)
        else:
            raise InjectedFault(point)


class FaultyDevice(Device):
    def __init__(self, device: Device, injector: Injector) -> None:
        self._device = device
        self._injector = injector

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    def memory(self) -> DeviceMemory | None:
        return self._device.memory()

    @property
    def schedule_stream(self) -> Stream:
        return self._device.schedule_stream

    def new_stream(self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None) -> Stream:
        return FaultyStream(self._device.new_stream(name, kind, on_event), self._injector)

    @property
    def runs_pieces_beside(self) -> bool:
        return self._device.runs_pieces_beside

    @property
    def tells_of_events(self) -> bool:
        return self._device.tells_of_events

    def progress(self) -> Sequence[StreamProgress]:
        return self._device.progress()

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._allocate()
        return self._device.host_buffer(shape, dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        self._allocate()
        return self._device.to_host(tensor)

    def to_device(self, tensor: Tensor) -> Tensor:
        return self._device.to_device(tensor)

    def close(self, timeout_s: float) -> None:
        self._device.close(timeout_s)

    def _allocate(self) -> None:
        if self._injector.visit(HOST_MEMORY) is not None:
            raise torch.OutOfMemoryError(f"injected at {HOST_MEMORY}")
