"""The progress that each stream reports to the watchdog, on every implementation."""

from __future__ import annotations

import time

import pytest

from common.device.stream import PieceFailed, StreamKind, StreamProgress
from tests.device.rigs import BOUND_S, Rig, boom, finish


def progress_of(rig: Rig, name: str) -> StreamProgress:
    return next(progress for progress in rig.device.progress() if progress.name == name)


def test_a_stream_is_busy_until_what_it_has_is_done_and_its_number_grows_with_it(rig: Rig) -> None:
    forward = rig.device.new_stream("forward", StreamKind.COPY)
    assert not progress_of(rig, "forward").is_busy
    assert progress_of(rig, "forward").kind is StreamKind.COPY
    rig.hold(forward)
    forward.enqueue(lambda: None)
    end = forward.record()
    held = progress_of(rig, "forward")
    assert held.is_busy
    assert progress_of(rig, "forward") == held, "it moves though it is held"
    rig.release()
    end.synchronize(BOUND_S)
    soon_s = time.monotonic() + BOUND_S
    while (after := progress_of(rig, "forward")).is_busy:  # the event is reported before the stream counts it
        assert time.monotonic() < soon_s
    assert after.num_done > held.num_done


def test_a_stream_that_waits_for_another_is_not_busy(rig: Rig) -> None:
    if rig.kind == "cuda":
        pytest.skip("a CUDA stream cannot tell")
    forward, copy = rig.device.new_stream("forward"), rig.device.new_stream("copy")
    rig.hold(forward)
    forward.enqueue(lambda: None)
    copy.wait(forward.record())
    copy.enqueue(lambda: None)
    soon_s = time.monotonic() + BOUND_S
    while progress_of(rig, "copy").is_busy:  # the stream's thread must reach the wait
        assert time.monotonic() < soon_s
    assert progress_of(rig, "forward").is_busy


def test_a_stream_that_failed_says_so(rig: Rig) -> None:
    forward = rig.device.new_stream("forward")
    assert progress_of(rig, "forward").error is None
    forward.enqueue(boom)
    with pytest.raises(PieceFailed):
        finish(forward)
    assert isinstance(progress_of(rig, "forward").error, ValueError)
