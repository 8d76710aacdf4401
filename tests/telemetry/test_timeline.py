"""Tests of the timeline recorder: tracks keep events while somebody records, and nothing otherwise."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from common.device.cpu import CpuDevice
from common.device.stream import Measured, Scope
from common.errors import RecordingInProgress
from common.telemetry.timeline import EventKind, Timeline, TimelineEvent, Track, recorded

BOUND_S = 60.0


def stopped(timeline: Timeline, track: str = "engine") -> list[TimelineEvent]:
    (found,) = [each for each in timeline.stop().take_tracks() if each.name == track]
    return found.events


@pytest.fixture
def timeline() -> Timeline:
    return Timeline()


@pytest.fixture
def track(timeline: Timeline) -> Track:
    return timeline.track("engine")


def test_spans_tasks_and_counters_are_kept_while_somebody_records(timeline: Timeline, track: Track) -> None:
    timeline.start(max_events=10)
    with suppress(KeyError), track.span("step", "N", rows=3), track.span("launch"):
        raise KeyError("a span that fails is kept too")
    with track.task("write", "request", tokens=2):
        pass
    track.count("rows", running=4)
    launch, step, write, rows = stopped(timeline)
    assert (launch.name, step.name, step.detail, step.figures) == ("launch", "step", "N", {"rows": 3})
    assert step.start_ns <= launch.start_ns
    assert launch.start_ns + launch.duration_ns <= step.start_ns + step.duration_ns <= time.monotonic_ns()
    assert (write.kind, write.task, write.figures) == (EventKind.TASK, "request", {"tokens": 2})
    assert (rows.kind, rows.name, rows.figures) == (EventKind.COUNTER, "rows", {"running": 4})


def test_nothing_is_kept_before_between_and_after_recordings(timeline: Timeline, track: Track) -> None:
    for _ in range(2):
        with track.span("outside"):
            pass
        track.count("outside", value=1)
        track.ended("outside", time.monotonic_ns())
        timeline.start(max_events=10)
        with track.span("inside"):
            pass
        recording = timeline.stop()
        assert track.ring is None
        assert [[event.name for event in each.events] for each in recording.take_tracks()] == [["inside"]]


def test_a_span_that_has_not_ended_is_in_no_recording(timeline: Timeline, track: Track) -> None:
    timeline.start(max_events=10)
    with track.span("long"):
        first = timeline.stop()
        timeline.start(max_events=10)
    assert stopped(timeline) == []
    assert [each.events for each in first.take_tracks()] == [[]]


def test_an_event_that_is_not_counted_yet_is_no_dropped_one(timeline: Timeline, track: Track) -> None:
    timeline.start(max_events=3)
    ring = track.ring
    assert ring is not None
    recording = timeline.stop()
    ring.events.append(TimelineEvent(EventKind.SPAN, "step", recording.start_ns))  # its writer is about to count it
    (read,) = recording.take_tracks()
    assert (len(read.events), read.num_dropped) == (1, 0)


def test_what_was_recorded_is_let_go_of_as_it_is_read(timeline: Timeline, track: Track) -> None:
    """Reference counts must free each event once it is read. In a reference cycle it would live until the garbage
    collector runs, which would disturb serving.
    """
    later = timeline.track("later")
    timeline.start(max_events=3)
    with track.span("step"):
        pass
    assert track.ring is not None and later.ring is not None
    ring, was_alive = weakref.ref(track.ring), []

    class Looks:
        def resolve(self) -> None:
            was_alive.append(ring() is not None)

    later.ring.add(Looks())
    recording = timeline.stop()
    gc.disable()
    try:
        assert [len(read.events) for read in recording.take_tracks()] == [1, 0]
    finally:
        gc.enable()
    assert was_alive == [False]
    assert recording.take_tracks() == []


def test_a_full_ring_keeps_the_newest_and_says_how_many_it_dropped(timeline: Timeline, track: Track) -> None:
    timeline.start(max_events=3)
    for number in range(5):
        with track.span(f"{number}"):
            pass
    (read,) = timeline.stop().take_tracks()
    assert [event.name for event in read.events] == ["2", "3", "4"]
    assert read.num_dropped == 2


def test_one_recording_at_a_time(timeline: Timeline) -> None:
    timeline.start(max_events=1)
    with pytest.raises(RecordingInProgress):
        timeline.start(max_events=1)
    timeline.stop()
    timeline.start(max_events=1)
    timeline.stop()


def test_a_recorded_method_is_a_span_of_its_objects_track(timeline: Timeline, track: Track) -> None:
    class Engine:
        def __init__(self) -> None:
            self.track = track

        @recorded("launch")
        def launch(self, rows: int, *, depth: int) -> int:
            return rows * depth

    assert Engine().launch(2, depth=3) == 6
    timeline.start(max_events=10)
    assert Engine().launch(2, depth=3) == 6
    assert [event.name for event in stopped(timeline)] == ["launch"]


@pytest.fixture
def device(timeline: Timeline) -> Iterator[CpuDevice]:
    device = CpuDevice(num_threads=1, wait_timeout_s=BOUND_S, timeline=timeline)
    yield device
    device.close(BOUND_S)


def test_a_streams_pieces_are_on_its_track_with_their_scope_and_figures(timeline: Timeline, device: CpuDevice) -> None:
    stream = device.new_stream("forward")

    def decode() -> None:
        pass

    stream.enqueue(decode, Scope("step 0"))
    stream.record().synchronize(BOUND_S)
    timeline.start(max_events=10)
    stream.enqueue(Measured(decode, {"rows": 8}), Scope("step 1"))
    stream.record().synchronize(BOUND_S)
    (event,) = stopped(timeline, "forward")
    assert (event.name, event.detail, event.figures) == ("decode", "step 1", {"rows": 8})


def test_where_a_stream_waits_for_another_is_on_its_track(timeline: Timeline, device: CpuDevice) -> None:
    forward, sending = device.new_stream("forward"), device.new_stream("sending")
    gate = threading.Event()

    def compute() -> None:
        assert gate.wait(BOUND_S)

    def copy_out() -> None:
        pass

    timeline.start(max_events=10)
    forward.enqueue(compute)
    sending.wait(forward.record())
    sending.enqueue(copy_out)
    while not sending.progress().num_done and not sending._is_waiting:  # type: ignore[attr-defined]
        pass
    gate.set()
    sending.record().synchronize(BOUND_S)
    wait, copy = stopped(timeline, "sending")
    assert (wait.name, copy.name) == ("wait", "copy_out")
    assert wait.start_ns + wait.duration_ns <= copy.start_ns
