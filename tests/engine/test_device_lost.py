"""A failing device or stream is not a failed step: the engine ends, so that all requests can continue elsewhere."""

from __future__ import annotations

import pytest

from common.device.stream import DeviceLost, DeviceTimeout, PieceFailed, StreamClosed
from common.errors import EngineFault
from tests.engine.harness import ScriptedEngine
from tests.engine.speculating import CHAIN
from tests.support.scripted_device import ScriptedDevice, refuse


def test_closing_closes_every_stream_although_a_step_does_not_end() -> None:
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=60)
    scripted.submit("a", [1, 2, 3], 20)
    scripted.start("a")
    scripted.device.on_synchronize = lambda device, event: None
    with pytest.raises(DeviceTimeout):
        scripted.engine.close()
    for stream in scripted.device.streams:
        with pytest.raises(StreamClosed):
            stream.enqueue(print)


@pytest.mark.parametrize("fault", [DeviceLost("the device faulted"), StreamClosed("its thread died")], ids=repr)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_the_engine_ends_and_blames_no_request(fault: EngineFault, overlap: bool) -> None:
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=60, overlap=overlap)
    outcome = scripted.submit("a", [1, 2, 3], 20)

    def forward(_batch: object) -> object:
        raise fault

    scripted.model.forward = forward  # type: ignore[method-assign, assignment]
    with pytest.raises(PieceFailed) as caught:
        scripted.run()
    assert caught.value.__cause__ is fault
    assert outcome.error is None, "it would end INTERNAL, and no client would resume it"


class LostDevice(ScriptedDevice):
    def failure_for(self, error: BaseException) -> BaseException:
        return DeviceLost("the device faulted, seen outside of pieces")


def test_a_fault_that_the_schedule_side_meets_is_named() -> None:
    scripted = ScriptedEngine(device=LostDevice(), max_rows=2, max_kv_tokens=60)

    def reclaim() -> int:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    scripted.engine.pool.reclaim = reclaim  # type: ignore[method-assign]
    with pytest.raises(DeviceLost, match="outside of pieces"):
        scripted.step()


def test_kv_that_a_dead_stream_never_copied_does_not_count_as_landed() -> None:
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=60)
    scripted.submit("a", [1, 2, 3], 20)
    scripted.step()
    scripted.hand_over("a")
    scripted.step()
    assert scripted.landing.pending()
    scripted.device.on_synchronize = refuse
    with pytest.raises(DeviceTimeout):
        scripted.landing.close(0.0)
    with pytest.raises(StreamClosed, match="landing"):
        scripted.step()


def test_a_device_lost_under_verify_is_named_by_the_wait_for_lengths() -> None:
    """The wait for lengths is the first to notice the loss. It must report it before anything computes with lengths
    that were never published.
    """
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=60, spec_info=CHAIN)
    outcome = scripted.submit("a", [1, 2, 3], 20)
    scripted.start("a")

    def lose(_batch: object) -> None:
        raise DeviceLost("the device faulted")

    scripted.model.on_forward = lose
    with pytest.raises(PieceFailed, match=r"^publish_ready of step 0: DeviceLost: the device faulted") as caught:
        scripted.step()
    assert caught.value.is_of_device
    assert outcome.error is None
