"""Tests of the calls that CudaDevice makes to CUDA, on a fake: on which device, how long it waits, and how it reports a
fault.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.device import cuda as cuda_module
from common.device.cuda import CudaEvent
from common.device.factory import open_device
from common.device.piece import failure_of
from common.device.stream import (
    DeviceLost,
    DeviceTimeout,
    PieceFailed,
    Scope,
    naming_a_lost_device,
    raise_if_device_failed,
    wait_in_order,
)
from common.device.upload import across_devices, upload
from common.errors import ConfigError, StartupError
from common.service.engine_thread import EngineInbox, EngineThread
from common.service.watchdog import Watchdog
from common.telemetry.stats import EngineLoad, PoolCounts
from tests.device.fake_cuda import CudaDeviceOnFake, FakeCuda, FakeEvent, FakeStream
from tests.device.rigs import BOUND_S

FAULT = "an illegal memory access was encountered"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(num_devices=3).patched(monkeypatch)


class IdleEngine:
    """An engine that uses the device in every step outside of pieces (units of stream work)."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.has_stepped = threading.Event()
        self.fails = False

    def step(self, commands: object) -> None:
        self._cuda.ask("step")
        self.has_stepped.set()
        if self.fails:
            raise_if_device_failed(CudaEvent(torch.cuda.Event(), "step 4", DeviceLost("the device faulted")))

    def idle_timeout_s(self) -> float:
        return BOUND_S

    def be_woken_by(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def load(self) -> EngineLoad:
        return EngineLoad(PoolCounts(0, 0), PoolCounts(0, 0), num_queued=0, num_running=0, num_steps=0)

    def close(self) -> None:
        self._cuda.ask("close")


def begun(
    engine: IdleEngine, *, on_death: Callable[[BaseException], object] = print, **options: Any
) -> EngineThread[str]:
    """Starts a thread of the engine, which then steps."""
    inbox: EngineInbox[str] = EngineInbox()
    thread = EngineThread(inbox=inbox, engine=engine, on_death=on_death, name="engine", **options)
    thread.start()
    inbox.post("go")
    return thread


# ---- the current device -----------------------------------------------------------------------------------------


def test_the_thread_that_opens_a_device_has_entered_it(cuda: FakeCuda) -> None:
    open_device("cuda:2", num_threads=1)
    assert cuda.current_device == 2


def test_the_engines_thread_enters_its_device_before_it_steps(cuda: FakeCuda) -> None:
    engine, device = IdleEngine(cuda), CudaDeviceOnFake(cuda, 2)
    thread = begun(engine, enter=device.enter_thread)
    assert engine.has_stepped.wait(BOUND_S)
    assert thread.stop(BOUND_S)
    assert {index for _, index in cuda.asked} == {2}


def test_a_piece_runs_on_its_streams_device_whatever_its_thread_has_entered(cuda: FakeCuda) -> None:
    stream = CudaDeviceOnFake(cuda, 2).new_stream("forward")
    torch.cuda.set_device(0)
    stream.enqueue(lambda: cuda.ask("kernel"))
    assert cuda.asked == [("kernel", 2)]
    assert cuda.current_device == 0


def test_a_graph_is_recorded_and_weighed_on_its_streams_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def graph(graph: object, *, stream: FakeStream, **options: object) -> Iterator[None]:
        cuda.ask(f"record on cuda:{stream.device.index}")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cuda.ask("empty the cache"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: device.index)
    device = CudaDeviceOnFake(cuda, 2)
    recorder = device.graphs
    assert recorder is not None
    torch.cuda.set_device(0)
    device.new_stream("forward").enqueue(lambda: recorder.new_graph().record(lambda: ()))
    assert recorder.held_bytes() == 2
    assert cuda.asked == [("record on cuda:2", 2), ("empty the cache", 2)]


@pytest.mark.parametrize("how", ["host_buffer", "upload"])
def test_memory_is_pinned_by_the_device_that_it_is_for(
    how: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("cuda:1", num_threads=1)
    torch.cuda.set_device(0)
    empty = torch.empty

    def noted_empty(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        if pin_memory:
            cuda.ask("pin")
        return empty(*args, **kwargs)  # type: ignore[call-overload, no-any-return]

    def noted_pin(tensor: torch.Tensor) -> torch.Tensor:
        cuda.ask("pin")
        return tensor

    monkeypatch.setattr(torch, "empty", noted_empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", noted_pin)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: (tensor, args, kwargs))
    if how == "host_buffer":
        device.host_buffer((2,), torch.int64)
    else:
        _, args, kwargs = upload([1, 2], torch.int64, device.torch_device)  # type: ignore[misc]
        assert (args, kwargs) == ((torch.device("cuda:1"),), {"non_blocking": True})
    assert cuda.asked == [("pin", 1)]


@pytest.mark.parametrize("name", ["cuda:3", "cuda:127"])
def test_a_device_past_the_last_is_refused_in_one_line(name: str, cuda: FakeCuda) -> None:
    with pytest.raises(ConfigError) as refused:
        open_device(name, num_threads=1)
    assert str(refused.value) == f"device: '{name}' is not there; 3 CUDA devices are"


@pytest.mark.parametrize(
    "name", ["", "gpu", "meta", "cpu,cuda", "cuda:-1", "cuda:x", "cuda:", "cuda: 1", "cuda:01", "CUDA:1", "cuda:300"]
)
def test_a_name_that_is_none_is_refused_in_one_line(name: str, cuda: FakeCuda) -> None:
    with pytest.raises(ConfigError, match=r"^device: [^\n]*$"):
        open_device(name, num_threads=1)


def test_a_device_that_is_there_and_does_not_work_is_told_in_one_line(cuda: FakeCuda) -> None:
    cuda.faulted = "CUDA driver version is insufficient"
    cuda.set_device = lambda device: cuda.check()  # type: ignore[method-assign]
    torch.cuda.set_device = cuda.set_device
    with pytest.raises(StartupError, match=r"^device: 'cuda' does not work: [^\n]*insufficient$"):
        open_device("cuda", num_threads=1)


# ---- waiting times ----------------------------------------------------------------------------------------------


class Clock:
    """A clock that advances by the time slept, and by a microsecond each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("done_s", [0.0, 90e-6, 1.001e-3, 7.77e-3, 0.2])
def test_a_wait_ends_within_a_tenth_of_a_millisecond_of_its_event(
    done_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(cuda_module, "time", clock)

    class Event:
        def query(self) -> bool:
            return clock.now_s >= done_s

    CudaEvent(Event(), "publish_ready of step 3", None).synchronize(1.0)  # type: ignore[arg-type]
    assert clock.now_s - done_s < 1e-4


def test_a_wait_goes_on_after_a_time_in_which_the_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(cuda_module, "time", clock)
    num_queries = 0

    class Event:
        def query(self) -> bool:
            nonlocal num_queries
            num_queries += 1
            if num_queries == 2:
                clock.now_s += 1000.0
            return num_queries == 5

    CudaEvent(Event(), "publish_ready of step 3", None).synchronize(300.0)  # type: ignore[arg-type]


def test_a_wait_that_is_over_its_bound_names_its_event_and_stream(cuda: FakeCuda) -> None:
    forward = CudaDeviceOnFake(cuda).new_stream("forward")
    forward.enqueue(lambda: cuda.hold() and None)
    begin_s = time.monotonic()
    with pytest.raises(DeviceTimeout, match=r"^stream forward did not reach publish_ready of step 3 within 0\.01 s$"):
        forward.record(Scope("step 3"), "publish_ready").synchronize(0.01)
    assert time.monotonic() - begin_s < BOUND_S


# ---- faults -----------------------------------------------------------------------------------------------------


def test_a_lost_device_is_named_by_the_wait_that_met_it(cuda: FakeCuda) -> None:
    forward, step = CudaDeviceOnFake(cuda).new_stream("forward"), Scope("step 3")
    event = forward.record(step, "publish_ready")
    cuda.faulted = FAULT
    told = f"the device faulted, seen waiting for publish_ready of step 3 on stream forward: CUDA error: {FAULT}"
    for wait in (event.synchronize, lambda bound_s: wait_in_order(event, bound_s)):
        with pytest.raises(PieceFailed, match=r"^publish_ready of step 3: DeviceLost: ") as failed:
            wait(BOUND_S)
        assert failed.value.is_of_device and str(failed.value.__cause__) == told
    with pytest.raises(DeviceLost):
        raise_if_device_failed(event)


def test_a_fault_that_a_piece_meets_is_the_devices_and_not_its_steps(cuda: FakeCuda) -> None:
    forward, step = CudaDeviceOnFake(cuda).new_stream("forward"), Scope("step 3")

    def decode() -> None:
        cuda.faulted = FAULT
        cuda.check()

    forward.enqueue(decode, step)
    assert isinstance(step.error, DeviceLost)
    assert str(step.error).startswith("the device faulted, seen putting work on stream forward: CUDA error")
    assert step.error.__notes__ == ["in piece 'decode' of step 3 on stream forward"]


LIBRARIES = ["Triton Error [CUDA]", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx()`"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_fault_is_the_devices_whatever_library_tells_of_it(library: str, cuda: FakeCuda) -> None:
    device, step = CudaDeviceOnFake(cuda), Scope("step 3")
    forward = device.new_stream("forward")

    def decode() -> None:
        cuda.faulted = FAULT
        cuda.launch(library)

    forward.enqueue(decode, step)
    assert isinstance(step.error, DeviceLost)
    with pytest.raises(PieceFailed) as failed:
        forward.record(step).synchronize(BOUND_S)
    assert failed.value.is_of_device
    with pytest.raises(DeviceLost, match="seen outside of pieces: CUDA error") as lost, naming_a_lost_device(device):
        cuda.launch(library)
    assert library in str(lost.value.__cause__)


def test_a_stream_that_is_lost_says_so_although_its_step_failed_before() -> None:
    step, stream = Scope("step 3"), Scope("forward")
    step.fail(ValueError("the piece's own"))
    assert isinstance(failure_of(step, stream), ValueError)
    stream.fail(DeviceLost("the device faulted"))
    assert isinstance(failure_of(step, stream), DeviceLost)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        RuntimeError("Triton Error [CUDA]: bad grid"),
    ],
    ids=repr,
)
def test_an_error_that_leaves_the_device_well_fails_its_piece_alone(error: Exception, cuda: FakeCuda) -> None:
    device, step = CudaDeviceOnFake(cuda), Scope("step 3")
    forward = device.new_stream("forward")

    def too_large() -> None:
        raise error

    forward.enqueue(too_large, step)
    assert step.error is error
    with pytest.raises(type(error)) as raised, naming_a_lost_device(device):
        too_large()
    assert raised.value is error
    forward.record(Scope("step 4")).synchronize(BOUND_S)


def test_an_engine_that_ends_by_a_lost_device_says_so(cuda: FakeCuda) -> None:
    engine, device = IdleEngine(cuda), CudaDeviceOnFake(cuda)
    engine.fails = True
    has_died = threading.Event()
    thread = begun(engine, on_death=lambda error: has_died.set())
    watchdog = Watchdog(engine=thread, device=device, num_layers_begun=lambda: 0, stall_timeout_s=60.0)
    assert has_died.wait(BOUND_S)
    watchdog.look()
    assert str(watchdog.lost) == "the engine died: DeviceLost: the device faulted"


# ---- several devices --------------------------------------------------------------------------------------------


def tensors_on(*indices: int) -> list[Tensor]:
    tensors: list[Any] = [SimpleNamespace(device=torch.device("cuda", index)) for index in indices]
    return tensors


@pytest.mark.parametrize("fails", [False, True])
def test_work_on_other_devices_comes_after_the_streams_earlier_work_and_before_its_later_work(
    fails: bool, cuda: FakeCuda
) -> None:
    torch.cuda.set_device(1)
    earlier = cuda.hold()
    others = [torch.cuda.current_stream(torch.device("cuda", index)) for index in (0, 2)]
    work, later = [FakeEvent(cuda), FakeEvent(cuda)], FakeEvent(cuda)
    with contextlib.suppress(ZeroDivisionError), across_devices(tensors_on(1, 0, 2, 0)):
        gates = []
        for event, other in zip(work, others, strict=True):
            with torch.cuda.stream(other):
                gates.append(cuda.hold())
            gates[-1].set()
            event.record(other)
        assert not any(event.query() for event in work)
        for gate in gates:
            gate.clear()
        if fails:
            raise ZeroDivisionError
    later.record(torch.cuda.current_stream())

    earlier.set()
    assert not later.query() and not any(event.query() for event in work)
    gates[0].set()
    assert work[0].query() and not later.query()
    gates[1].set()
    assert work[1].query() and later.query()


def test_tensors_of_the_host_need_no_order(cuda: FakeCuda) -> None:
    """To ask for a stream of the host would raise."""
    with across_devices([torch.zeros(1), torch.zeros(1)]):
        cuda.ask("copy")
    assert cuda.asked == [("copy", 0)]
