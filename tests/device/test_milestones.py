"""Work that starts after a milestone (a point inside a piece), on every implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from common.device.stream import Scope, Stream
from tests.device.rigs import BOUND_S, Rig, boom, finish
from tests.support.scripted_device import ScriptedDevice


def test_work_behind_a_milestone_runs_before_its_piece_has_ended(rig: Rig) -> None:
    journal = rig.journal
    forward, copy = rig.device.new_stream("forward"), rig.device.new_stream("copy")
    gate = threading.Event()

    def layers(milestones: Sequence[Callable[[], None]]) -> None:
        journal.write(1)
        milestones[0]()
        if rig.kind == "cpu":
            assert gate.wait(BOUND_S), "the copy waits for the whole piece"
        journal.write(3)

    def copied() -> None:
        journal.write(2)
        gate.set()

    (written,) = forward.enqueue_with_milestones(layers, 1)
    copy.wait(written)
    copy.enqueue(copied)
    if isinstance(rig.device, ScriptedDevice):
        rig.device.on_host_call = _run_ready
    finish(forward)
    finish(copy)
    assert sorted(journal.read()) == [1, 2, 3]
    if rig.device.runs_pieces_beside:  # otherwise the streams may run in any order here
        assert journal.read() == [1, 2, 3]


def test_milestones_that_a_piece_never_comes_to_are_passed_behind_it(stream: Stream) -> None:
    first, second = stream.enqueue_with_milestones(lambda milestones: milestones[0](), 2)
    finish(stream)
    assert first.is_done() and second.is_done()
    assert first.error is None and second.error is None


def test_a_failure_shows_in_the_milestones_behind_it_alone(stream: Stream) -> None:
    step = Scope("step")

    def fails_midway(milestones: Sequence[Callable[[], None]]) -> None:
        milestones[0]()
        boom()

    before, behind = stream.enqueue_with_milestones(fails_midway, 2, step)
    (skipped,) = stream.enqueue_with_milestones(lambda milestones: milestones[0](), 1, step)
    finish(stream)
    assert before.is_done() and before.error is None
    assert isinstance(behind.error, ValueError)
    assert isinstance(skipped.error, ValueError)
    assert isinstance(step.error, ValueError)


def _run_ready(device: ScriptedDevice) -> None:
    for stream in device.ready_streams():
        stream.run_next()
