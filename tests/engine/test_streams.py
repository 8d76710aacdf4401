"""Invariant I11: each device has one Stream and one Event type."""

from __future__ import annotations

from common.device.cpu import CpuDevice
from common.device.stream import Event
from tests.engine.harness import ScriptedEngine


def check_a_device_has_one_event_type() -> None:
    """An event has the same methods whichever stream recorded it, and every stream of its device can wait for it."""
    scripted = ScriptedEngine()
    cpu = CpuDevice(num_threads=1, wait_timeout_s=5.0)
    try:
        for device in (scripted.device, cpu):
            streams = [device.schedule_stream, device.new_stream("a"), device.new_stream("b")]
            for recorder in streams:
                event: Event = recorder.record()
                for waiter in streams:
                    waiter.wait(event)
                event.synchronize(5.0)
                assert event.is_done() and event.error is None
    finally:
        cpu.close(5.0)


def test_a_device_has_one_event_type() -> None:
    check_a_device_has_one_event_type()
