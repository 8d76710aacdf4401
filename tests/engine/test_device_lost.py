"""A device or a stream that fails is no failed step: the engine ends, so that all requests can go on elsewhere."""

from __future__ import annotations

import pytest

from common.device.errors import DeviceLost, DeviceTimeout, PieceFailed, StreamClosed
from common.errors import EngineFault
from tests.engine.harness import ScriptedEngine


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
