"""The scripted device: the test decides which work has run."""

from __future__ import annotations

import itertools
import random

import pytest

from common.device.stream import DeviceTimeout, PieceFailed, Scope, StreamClosed
from tests.device.rigs import BOUND_S, boom
from tests.support.scripted_device import NotReady, ScriptedDevice, ScriptedStream, pick_with, refuse, run_needed


class Script:
    """Pieces (units of stream work) that append their names to a list when they run."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def put(self, stream: ScriptedStream, name: str) -> None:
        def piece() -> None:
            self.ran.append(name)

        piece.__name__ = name
        stream.enqueue(piece)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def device() -> ScriptedDevice:
    return ScriptedDevice()


def test_nothing_runs_until_the_test_says_so(device: ScriptedDevice, script: Script) -> None:
    forward = device.new_stream("forward")
    assert device.stream("forward") is forward
    script.put(forward, "verify")
    verified = forward.record()
    script.put(forward, "extend")
    assert forward.pending() == ["verify", "extend"]
    assert script.ran == [] and not verified.is_done()
    assert forward.run_next() == "verify"
    assert verified.is_done() and forward.pending() == ["extend"]
    forward.run_next()
    with pytest.raises(NotReady, match="nothing to run"):
        forward.run_next()


def test_a_stream_that_waits_is_blocked_until_the_other_has_run(device: ScriptedDevice, script: Script) -> None:
    forward, copy = device.new_stream("forward"), device.new_stream("copy")
    script.put(forward, "verify")
    verified = forward.record()
    copy.wait(verified)
    script.put(copy, "fetch")
    assert copy.blocked_on is verified
    assert device.ready_streams() == [forward]
    with pytest.raises(NotReady, match="copy waits for another stream"):
        copy.run_next()
    forward.run_next()
    assert device.ready_streams() == [copy]
    copy.run_next()
    assert script.ran == ["verify", "fetch"]


def test_an_event_behind_a_chain_of_waits_is_done_with_the_last_of_them(device: ScriptedDevice, script: Script) -> None:
    first, second, third = (device.new_stream(name) for name in ("first", "second", "third"))
    third.wait(second.record())
    script.put(first, "work")
    second.wait(first.record())
    third.wait(second.record())
    end = third.record()
    assert not end.is_done()
    first.run_next()
    assert end.is_done()


def test_blocking_runs_what_the_event_needs_and_nothing_else(device: ScriptedDevice, script: Script) -> None:
    forward, copy, landing = (device.new_stream(name) for name in ("forward", "copy", "landing"))
    script.put(forward, "verify")
    copy.wait(forward.record())
    script.put(forward, "extend")
    script.put(copy, "fetch")
    fetched = copy.record()
    script.put(copy, "later")
    script.put(landing, "land")
    fetched.synchronize(BOUND_S)
    assert script.ran == ["verify", "fetch"]


def test_a_refusal_says_what_is_pending_whichever_stream_waits(device: ScriptedDevice, script: Script) -> None:
    device.on_synchronize = refuse
    forward = device.new_stream("forward")
    script.put(forward, "verify")
    verified = forward.record()
    for wait in (lambda: verified.synchronize(BOUND_S), lambda: device.schedule_stream.wait(verified)):
        with pytest.raises(DeviceTimeout, match=r"forward: \['verify'\]"):
            wait()
    assert script.ran == []
    device.on_synchronize = run_needed
    device.schedule_stream.wait(verified)
    assert script.ran == ["verify"]


def test_a_policy_may_pick_any_order_that_the_events_permit(script: Script) -> None:
    """All orders of two independent streams occur, and none that violates a wait."""
    orders: set[tuple[str, ...]] = set()
    for seed in range(100):
        rng = random.Random(seed)
        device, script = ScriptedDevice(on_synchronize=pick_with(rng.choice)), Script()
        forward, copy = device.new_stream("forward"), device.new_stream("copy")
        script.put(forward, "a1")
        first = forward.record()
        script.put(forward, "a2")
        script.put(copy, "b1")
        copy.wait(first)
        script.put(copy, "b2")
        forward.wait(copy.record())
        forward.record().synchronize(BOUND_S)
        orders.add(tuple(script.ran))
    legal = {
        order
        for order in itertools.permutations(["a1", "a2", "b1", "b2"])
        if order.index("a1") < order.index("a2")
        and order.index("b1") < order.index("b2")
        and order.index("a1") < order.index("b2")
    }
    assert orders == legal


def test_run_all_takes_turns_and_may_do_so_within_any_call(device: ScriptedDevice, script: Script) -> None:
    forward, copy = device.new_stream("forward"), device.new_stream("copy")
    for number in range(2):
        script.put(forward, f"a{number}")
        script.put(copy, f"b{number}")
    device.run_all()
    assert script.ran == ["a0", "b0", "a1", "b1"]
    device.on_host_call = ScriptedDevice.run_all
    script.put(forward, "a2")
    assert script.ran[-1] == "a2"


def test_a_stream_can_be_run_alone(device: ScriptedDevice, script: Script) -> None:
    forward, copy = device.new_stream("forward"), device.new_stream("copy")
    script.put(forward, "verify")
    verified = forward.record()
    script.put(forward, "extend")
    script.put(copy, "land")
    forward.run_until(verified)
    assert script.ran == ["verify"]
    forward.run_all()
    assert script.ran == ["verify", "extend"]
    copy.wait(forward.record())
    script.put(forward, "next")
    copy.wait(forward.record())
    script.put(copy, "fetch")
    with pytest.raises(NotReady):
        copy.run_all()
    assert script.ran == ["verify", "extend", "land"]


def test_a_skipped_piece_is_a_step_like_any_other(device: ScriptedDevice) -> None:
    forward, step = device.new_stream("forward"), Scope("step")
    forward.enqueue(boom, step)
    forward.enqueue(boom, step)
    end = forward.record(step)
    assert [forward.run_next(), forward.run_next()] == ["boom", "boom"]
    with pytest.raises(PieceFailed):
        end.synchronize(BOUND_S)


def test_closing_drops_what_the_policy_does_not_run(device: ScriptedDevice, script: Script) -> None:
    device.on_synchronize = refuse
    forward = device.new_stream("forward")
    script.put(forward, "verify")
    event = forward.record()
    with pytest.raises(DeviceTimeout):
        forward.close(BOUND_S)
    assert isinstance(event.error, StreamClosed)
    assert (forward.pending(), script.ran) == ([], [])
