"""Tests that on CUDA, the timeline takes the times of pieces (units of stream work) from the device's own events,
converted to the host's clock.
"""

from __future__ import annotations

import pytest
import torch

from common.device.cuda import CudaDevice
from common.device.stream import Measured, Scope
from common.telemetry.timeline import Timeline

pytestmark = pytest.mark.gpu

BOUND_S = 60.0
SKEW_NS = 1_000_000


def test_pieces_and_waits_are_timed_by_the_device() -> None:
    timeline = Timeline()
    device = CudaDevice(0, timeline=timeline)
    forward, sending = device.new_stream("forward"), device.new_stream("sending")
    matrix = torch.randn(2048, 2048, device="cuda")

    def compute() -> None:
        for _ in range(50):
            torch.mm(matrix, matrix)

    def copy_out() -> None:
        matrix.clone()

    forward.enqueue(compute)
    forward.record().synchronize(BOUND_S)
    timeline.start(max_events=100)
    forward.enqueue(Measured(compute, {"rows": 8}), Scope("step 1"))
    forward.enqueue(compute, Scope("step 2"))
    sending.wait(forward.record())
    sending.enqueue(copy_out)
    sending.record().synchronize(BOUND_S)
    recording = timeline.stop()
    events = {track.name: track.events for track in recording.take_tracks()}
    first, second = events["forward"]
    wait, copy = events["sending"]
    assert [(piece.name, piece.detail) for piece in (first, second)] == [("compute", "step 1"), ("compute", "step 2")]
    assert first.figures == {"rows": 8}
    assert (wait.name, copy.name) == ("wait", "copy_out")
    assert recording.start_ns - SKEW_NS <= first.start_ns
    for earlier, later in ((first, second), (second, copy), (wait, copy)):
        assert earlier.duration_ns > 0
        assert earlier.start_ns + earlier.duration_ns <= later.start_ns + SKEW_NS
    device.close(BOUND_S)
