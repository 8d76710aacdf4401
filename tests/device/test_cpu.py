"""CPU streams beyond the contract: work really runs asynchronously, and a stream thread that ends hangs no other
thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from common.device import cpu as cpu_module
from common.device.cpu import CpuDevice, CpuEvent
from common.device.stream import (
    LONGEST_LOOK_S,
    DeviceTimeout,
    Event,
    PieceFailed,
    Scope,
    Stream,
    StreamClosed,
    StreamKind,
)
from tests.device.rigs import BOUND_S, SOON_S, finish


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(num_threads=3, wait_timeout_s=BOUND_S)
    yield device
    device.close(BOUND_S)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def hold(stream: Stream, gate: threading.Event) -> None:
    """Blocks the stream until `gate` opens. Returns once the stream's thread is inside the blocking piece."""
    entered = threading.Event()

    def piece() -> None:
        entered.set()
        assert gate.wait(BOUND_S)

    stream.enqueue(piece)
    assert entered.wait(BOUND_S)


def test_the_schedule_stream_gives_up_at_the_bound_of_the_device(gate: threading.Event) -> None:
    device = CpuDevice(num_threads=1, wait_timeout_s=SOON_S)
    forward = device.new_stream("forward")
    hold(forward, gate)
    with pytest.raises(DeviceTimeout, match="forward"):
        device.schedule_stream.wait(forward.record())
    gate.set()
    device.close(BOUND_S)


def test_an_event_may_be_awaited_from_several_threads(device: CpuDevice, gate: threading.Event) -> None:
    forward = device.new_stream("forward")
    hold(forward, gate)
    event = forward.record()
    waiters = [threading.Thread(target=event.synchronize, args=(BOUND_S,)) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    gate.set()
    for waiter in waiters:
        waiter.join(BOUND_S)
    assert not any(waiter.is_alive() for waiter in waiters)


@pytest.mark.parametrize("timeout_s", [-1.0, -0.5, 0.0])
def test_a_bound_that_has_passed_already_does_not_wait(
    timeout_s: float, device: CpuDevice, gate: threading.Event
) -> None:
    forward = device.new_stream("forward")
    hold(forward, gate)
    event = forward.record()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            event.synchronize(timeout_s)
        except BaseException as error:
            raised.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(BOUND_S)
    assert [type(error) for error in raised] == [DeviceTimeout]


def test_a_time_in_which_the_process_was_stopped_counts_as_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []
    num_late = 1

    class Lock:
        """Locks in a process that was stopped in the first waits: they last longer than asked, and time out."""

        def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
            if timeout >= 0.0:
                waits_s.append(timeout)
            return len(waits_s) > num_late

        def release(self) -> None: ...

    monkeypatch.setattr(cpu_module, "threading", SimpleNamespace(Lock=Lock))
    CpuEvent(Scope("forward"), None).synchronize(300.0)
    assert waits_s == [LONGEST_LOOK_S] * 2

    waits_s, num_late = [], 1_000_000
    with pytest.raises(DeviceTimeout):
        CpuEvent(Scope("forward"), None).synchronize(300.5)
    assert sum(waits_s) == 300.5


# --- a stream that ends early


def test_what_a_stream_had_not_begun_when_it_was_given_up_is_dropped(device: CpuDevice, gate: threading.Event) -> None:
    ran: list[str] = []
    forward = device.new_stream("forward")
    hold(forward, gate)
    forward.enqueue(lambda: ran.append("late"))
    event = forward.record(Scope("step"))
    with pytest.raises(DeviceTimeout):
        forward.close(SOON_S)
    assert isinstance(event.error, StreamClosed)
    with pytest.raises(PieceFailed, match="ended before it reached this work"):
        event.synchronize(BOUND_S)
    gate.set()
    device.close(BOUND_S)
    assert ran == []


def test_a_stream_that_is_given_up_lets_those_who_wait_for_it_go_on(device: CpuDevice, gate: threading.Event) -> None:
    ran: list[str] = []
    forward, copy = device.new_stream("forward"), device.new_stream("copy")
    hold(forward, gate)
    copy.wait(forward.record())
    copy.enqueue(lambda: ran.append("copied"))
    with pytest.raises(DeviceTimeout):
        forward.close(SOON_S)
    finish(copy)
    assert ran == ["copied"]


def test_a_stream_that_waits_for_another_can_be_given_up(device: CpuDevice, gate: threading.Event) -> None:
    forward, copy = device.new_stream("forward"), device.new_stream("copy")
    hold(forward, gate)
    copy.wait(forward.record())
    event = copy.record()
    copy_thread = [thread for thread in threading.enumerate() if thread.name == "stream-copy"][-1]
    with pytest.raises(DeviceTimeout):
        copy.close(SOON_S)
    assert isinstance(event.error, StreamClosed)
    copy_thread.join(BOUND_S / 2)
    assert not copy_thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stream_whose_thread_died_completes_its_events(device: CpuDevice, gate: threading.Event) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    forward = device.new_stream("forward")
    hold(forward, gate)
    forward.enqueue(die)
    queued = forward.record()
    gate.set()
    with pytest.raises(PieceFailed):
        queued.synchronize(BOUND_S)
    with pytest.raises(PieceFailed):
        forward.record().synchronize(BOUND_S)


def test_an_idle_stream_keeps_nothing_of_its_last_piece(device: CpuDevice) -> None:
    released = threading.Event()

    class Payload:
        pass

    payload = Payload()
    weakref.finalize(payload, released.set)
    forward = device.new_stream("forward")
    forward.enqueue(lambda payload=payload: None)
    del payload
    assert released.wait(BOUND_S / 2)


# --- threads


def test_streams_keep_the_numbers_of_threads_of_their_kinds(device: CpuDevice) -> None:
    seen: list[int] = []
    forward, copy = device.new_stream("forward"), device.new_stream("copy", StreamKind.COPY)
    for stream in (forward, copy, forward):
        stream.enqueue(lambda: seen.append(torch.get_num_threads()))
        finish(stream)
    assert seen == [3, 1, 3]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads of the operating system")
def test_the_threads_of_a_compute_stream_exist(device: CpuDevice) -> None:
    """The number of threads that torch reports is the number that really compute."""

    def os_threads() -> set[str]:
        return {each.name for each in Path("/proc/self/task").iterdir()}

    seen: list[int] = []
    values = torch.ones(1 << 20)

    def compute() -> None:
        before = os_threads()
        values.exp()
        seen.append(len(os_threads() - before))

    forward = device.new_stream("forward")
    forward.enqueue(compute)
    finish(forward)
    assert seen == [2]


def test_grad_mode_is_left_as_torch_has_it(device: CpuDevice) -> None:
    seen: list[tuple[bool, bool]] = []
    forward = device.new_stream("forward")
    with torch.inference_mode():
        forward.enqueue(lambda: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())))
        finish(forward)
    assert seen == [(True, False)]


def test_a_stream_tells_of_each_event_once_it_is_done(device: CpuDevice, gate: threading.Event) -> None:
    """A milestone inside a piece is reported as soon as it is reached, so that a waiter need not wait for the whole
    piece.
    """
    told: SimpleQueue[list[bool]] = SimpleQueue()
    events: list[Event] = []
    stream = device.new_stream("landing", StreamKind.COPY, lambda: told.put([event.is_done() for event in events]))

    def work(milestones: Sequence[Callable[[], None]]) -> None:
        milestones[0]()
        assert gate.wait(BOUND_S)

    hold(stream, gate)
    events += stream.enqueue_with_milestones(work, 1)
    events += [stream.record(), stream.record()]
    assert told.empty()
    gate.set()
    seen = [told.get(timeout=BOUND_S) for _ in range(3)]
    assert seen == [[True, False, False], [True, True, False], [True, True, True]], "each event once, the milestone too"
