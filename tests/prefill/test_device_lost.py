"""Tests that a device failure during a prefill forward ends the engine. Its calls end, so that their rows are computed
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.attention.backend import ForwardInput
from common.device.errors import DeviceLost
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput
from common.sampling.params import ResolvedSampling
from tests.support.faulty_target import FaultyTarget
from tests.support.pair import InProcessPair


class TargetOnALostDevice(FaultyTarget):
    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        raise DeviceLost("the device faulted")


def test_the_engine_ends_and_fails_no_row_by_itself(tiny_target: Callable[[str], TargetModel]) -> None:
    pair = InProcessPair(TargetOnALostDevice(tiny_target("llama")))
    outcome = pair.submit("a", [10, 11, 12], ResolvedSampling(seed=0, max_tokens=4))
    try:
        with pytest.raises(DeviceLost):
            pair.run()
        assert not outcome.has_ended
        assert pair.decode.load().num_row_retries == 0, "the row was given back to the replica that is lost"
    finally:
        pair.close()


def test_a_fault_that_the_engines_own_thread_meets_is_named(
    tiny_target: Callable[[str], TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = InProcessPair(tiny_target("llama"))
    engine = pair.replicas[0].engine

    def reclaim() -> int:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine._device, "failure_for", lambda error: DeviceLost("the device faulted"))
            patch.setattr(engine.pool, "reclaim", reclaim)
            with pytest.raises(DeviceLost):
                engine.step([])
    finally:
        pair.close()
