"""The contract of streams and events, run against every implementation."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from common.device.stream import DeviceTimeout, PieceFailed, Scope, Stream, StreamClosed
from tests.device.rigs import BOUND_S, SOON_S, Rig, boom, finish
from tests.support.scripted_device import ScriptedDevice


class Payload:
    """An object that a weak reference can watch."""


# --- order


def test_pieces_run_in_the_order_of_their_enqueueing(rig: Rig, stream: Stream) -> None:
    journal = rig.journal
    for value in range(20):
        stream.enqueue(journal.piece(value))
    finish(stream)
    assert journal.read() == list(range(20))


def test_an_event_does_not_cover_later_work_and_stays_done(rig: Rig) -> None:
    forward = rig.device.new_stream("forward")
    forward.enqueue(lambda: None)
    early = finish(forward)
    rig.hold(forward)
    forward.enqueue(boom)
    late = forward.record()
    assert early.is_done() and not late.is_done()
    rig.release()
    with pytest.raises(PieceFailed):
        late.synchronize(BOUND_S)
    assert early.is_done() and early.error is None


def test_a_wait_orders_two_streams(rig: Rig) -> None:
    journal = rig.journal
    forward, copy = rig.device.new_stream("forward"), rig.device.new_stream("copy")
    finish(forward)
    finish(copy)
    rig.hold(forward)
    forward.enqueue(journal.piece(1))
    copy.wait(forward.record())
    copy.enqueue(journal.piece(2))
    end = copy.record()
    with pytest.raises(DeviceTimeout):
        end.synchronize(SOON_S)
    rig.release()
    end.synchronize(BOUND_S)
    assert journal.read() == [1, 2]


def test_a_stream_goes_on_beside_one_that_it_does_not_wait_for(rig: Rig) -> None:
    journal = rig.journal
    forward, copy = rig.device.new_stream("forward"), rig.device.new_stream("copy")
    finish(forward)
    if not isinstance(rig.device, ScriptedDevice):
        rig.hold(forward)
    forward.enqueue(journal.piece(1))
    held = forward.record()
    free = rig.device.to_host(torch.tensor([3]))
    copy.enqueue(lambda: free.add_(1))
    finish(copy)
    assert not held.is_done()
    assert free.tolist() == [4]


def test_a_wait_for_a_done_event_holds_nothing_up(rig: Rig, stream: Stream) -> None:
    journal, other = rig.journal, rig.device.new_stream("other")
    stream.wait(finish(other))
    stream.enqueue(journal.piece(1))
    finish(stream)
    assert journal.read() == [1]


def test_the_schedule_stream_waits_and_is_waited_for(rig: Rig) -> None:
    journal, forward, schedule = rig.journal, rig.device.new_stream("forward"), rig.device.schedule_stream
    journal.write(1)
    forward.wait(schedule.record())
    forward.enqueue(journal.piece(2))
    schedule.wait(forward.record())
    journal.write(3)
    finish(schedule)
    assert journal.read() == [1, 2, 3]


# --- failure


def test_a_piece_that_raises_fails_later_events_of_its_scope_and_is_named(stream: Stream) -> None:
    step = Scope("step 7")
    published = finish(stream, step)
    stream.enqueue(boom, step)
    event = stream.record(step, "publish_ready")
    with pytest.raises(PieceFailed, match=r"^publish_ready of step 7: ValueError: boom") as raised:
        event.synchronize(BOUND_S)
    error = raised.value.__cause__
    assert isinstance(error, ValueError) and error is event.error is step.error
    assert error.__notes__ == [f"in piece 'boom' of step 7 on stream {stream.name}"]
    assert event.is_done() and published.error is None


def test_later_pieces_of_a_failed_scope_are_skipped(rig: Rig, stream: Stream) -> None:
    journal, step = rig.journal, Scope("step")
    stream.enqueue(journal.piece(1), step)
    stream.enqueue(boom, step)
    stream.enqueue(journal.piece(2), step)
    with pytest.raises(PieceFailed):
        finish(stream, step)
    assert journal.read() == [1]


def test_a_scope_fails_on_every_stream(rig: Rig) -> None:
    journal, step = rig.journal, Scope("step")
    forward, copy = rig.device.new_stream("forward"), rig.device.new_stream("copy")
    forward.enqueue(boom, step)
    copy.wait(forward.record(step))
    copy.enqueue(journal.piece(1), step)
    with pytest.raises(PieceFailed, match="boom"):
        finish(copy, step)
    assert journal.read() == []


def test_other_scopes_run_on(rig: Rig, stream: Stream) -> None:
    journal = rig.journal
    bad, good = Scope("bad"), Scope("good")
    stream.enqueue(boom, bad)
    stream.enqueue(journal.piece(1), good)
    stream.enqueue(journal.piece(2))
    assert finish(stream, good).error is None
    assert finish(stream).error is None
    assert journal.read() == [1, 2]


def test_waiting_for_a_failed_event_does_not_fail_the_waiter(rig: Rig, stream: Stream) -> None:
    journal, other = rig.journal, rig.device.new_stream("other")
    bad, good = Scope("bad"), Scope("good")
    other.enqueue(boom, bad)
    stream.wait(other.record(bad))
    stream.enqueue(journal.piece(1), good)
    finish(stream, good)
    assert journal.read() == [1]


def test_the_first_failure_of_a_scope_stays() -> None:
    step = Scope("step")
    first = ValueError("first")
    step.fail(first)
    step.fail(ValueError("second"))
    assert step.error is first


def test_a_piece_without_scope_that_raises_fails_its_stream(rig: Rig, stream: Stream) -> None:
    journal, healthy = rig.journal, rig.device.new_stream("healthy")
    before = finish(stream)
    stream.enqueue(boom)
    stream.enqueue(journal.piece(1), Scope("step"))
    with pytest.raises(PieceFailed, match=f"{stream.name}: ValueError: boom"):
        finish(stream)
    with pytest.raises(PieceFailed):
        finish(stream, Scope("later"))
    finish(healthy)
    assert before.error is None
    assert journal.read() == []


# --- bounds


def test_synchronize_times_out_and_leaves_the_stream_usable(rig: Rig) -> None:
    journal, forward = rig.journal, rig.device.new_stream("forward")
    rig.hold(forward)
    forward.enqueue(journal.piece(1))
    event = forward.record()
    with pytest.raises(DeviceTimeout):
        event.synchronize(SOON_S)
    forward.enqueue(journal.piece(2))
    rig.release()
    event.synchronize(BOUND_S)
    finish(forward)
    assert journal.read() == [1, 2]


def test_close_lets_enqueued_work_finish(rig: Rig, stream: Stream) -> None:
    journal = rig.journal
    for value in range(5):
        stream.enqueue(journal.piece(value))
    event = stream.record()
    stream.close(BOUND_S)
    assert event.is_done()
    assert journal.read() == list(range(5))


def test_a_closed_stream_takes_no_work(stream: Stream) -> None:
    event = finish(stream)
    stream.close(BOUND_S)
    stream.close(BOUND_S)
    with pytest.raises(StreamClosed):
        stream.enqueue(lambda: None)
    with pytest.raises(StreamClosed):
        stream.record()
    with pytest.raises(StreamClosed):
        stream.wait(event)


def test_closing_a_device_closes_its_streams(rig: Rig) -> None:
    streams = [rig.device.new_stream("forward"), rig.device.new_stream("copy"), rig.device.schedule_stream]
    rig.device.close(BOUND_S)
    for stream in streams:
        with pytest.raises(StreamClosed):
            stream.record()


def test_close_gives_up_after_its_bound(rig: Rig) -> None:
    forward = rig.device.new_stream("forward")
    rig.hold(forward)
    forward.enqueue(lambda: None)
    with pytest.raises(DeviceTimeout):
        forward.close(SOON_S)


def test_a_device_closes_the_other_streams_of_one_that_hangs(rig: Rig) -> None:
    forward, copy = rig.device.new_stream("forward"), rig.device.new_stream("copy")
    rig.hold(forward)
    forward.enqueue(lambda: None)
    with pytest.raises(DeviceTimeout, match="forward"):
        rig.device.close(SOON_S)
    with pytest.raises(StreamClosed):
        copy.record()


# --- memory


@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_piece_is_let_go_once_it_has_run_or_was_skipped(stream: Stream, is_skipped: bool) -> None:
    payload, step = Payload(), Scope("step")
    watched = weakref.ref(payload)
    if is_skipped:
        stream.enqueue(boom, step)
    stream.enqueue(lambda payload=payload: None, step)
    del payload
    finish(stream)
    assert watched() is None


def test_a_failure_does_not_keep_the_locals_of_its_piece(stream: Stream) -> None:
    step, seen = Scope("step"), []

    def piece() -> None:
        payload = Payload()
        seen.append(weakref.ref(payload))
        raise ValueError("boom")

    stream.enqueue(piece, step)
    with pytest.raises(PieceFailed):
        finish(stream, step)
    gc.collect()
    assert step.error is not None
    assert seen[0]() is None


# --- copies


def test_what_goes_to_the_host_is_there(rig: Rig) -> None:
    """If host memory is the device's memory, nothing is copied."""
    source = torch.arange(6, device=rig.device.torch_device).view(2, 3)
    host = rig.device.to_host(source.t())
    finish(rig.device.schedule_stream)
    assert host.device.type == "cpu"
    assert host.tolist() == [[0, 3], [1, 4], [2, 5]]
    source.zero_()
    shares = rig.kind in ("cpu", "scripted")
    assert host.tolist() == ([[0, 0]] * 3 if shares else [[0, 3], [1, 4], [2, 5]])


def test_copies_to_the_device_never_share_storage(rig: Rig) -> None:
    host = torch.arange(3)
    there = rig.device.to_device(host)
    finish(rig.device.schedule_stream)
    host.zero_()
    assert there.device == rig.device.torch_device
    assert there.tolist() == [0, 1, 2]


def test_a_host_buffer_has_the_shape_and_type_asked_for(rig: Rig) -> None:
    buffer = rig.device.host_buffer((2, 3), torch.bfloat16)
    assert (tuple(buffer.shape), buffer.dtype, buffer.device.type) == ((2, 3), torch.bfloat16, "cpu")
