"""Tests of the ends of a prefill engine's forwards and of the engine itself: the extent of failures, lost devices, and
closing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from common.attention.backend import ForwardInput
from common.device.stream import DeviceLost, DeviceTimeout, StreamClosed
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput
from common.sampling.params import ResolvedSampling
from common.sampling.state import RowStart, SamplingState
from tests.support.engines import PrefillHalf
from tests.support.faulty_target import FaultyTarget
from tests.support.pair import InProcessPair
from tests.support.scripted_device import ScriptedDevice

CHUNK_TOKENS = 8


class Prefill(PrefillHalf):
    """A prefill engine whose forwards each hold one prompt of `CHUNK_TOKENS`. They run when the test says so."""

    def __init__(self, target: FaultyTarget) -> None:
        self.target = target
        self.now_s = 0.0
        self.device = ScriptedDevice()
        super().__init__(
            target,
            self.device,
            chunk_tokens=CHUNK_TOKENS,
            max_batch_tokens=CHUNK_TOKENS,
            clock=lambda: self.now_s,
        )

    def open_two(self) -> None:
        """Opens a call of two prompts. Each makes a forward, and both are launched."""
        prompts = [range(10 * i, 10 * i + CHUNK_TOKENS) for i in range(2)]
        self.open("call", prompts, ResolvedSampling(seed=3, max_tokens=4, temperature=5.0))
        assert self.device.stream("forward").pending().count("forward") == 2

    def run_first_forward(self) -> None:
        forward = self.device.stream("forward")
        while forward.pending().count("forward") == 2:
            forward.run_next()

    def run_all(self) -> None:
        for _ in range(5):
            self.device.run_all()
            self.step()

    @property
    def failed_rows(self) -> list[int]:
        return [failed.row for failed in self.failures]


MakePrefill = Callable[[], Prefill]


@pytest.fixture
def make_prefill(tiny_target: Callable[[str], TargetModel]) -> MakePrefill:
    return lambda: Prefill(FaultyTarget(tiny_target("llama")))


def test_a_forward_may_take_any_time(make_prefill: MakePrefill) -> None:
    """The watchdog ends an engine that hangs, and does not count the time in which the process was stopped."""
    prefill = make_prefill()
    prefill.open_two()
    prefill.now_s = 1e6
    prefill.step()
    prefill.run_first_forward()
    prefill.now_s = 2e6
    prefill.run_all()
    assert prefill.failed_rows == [] and len(prefill.first_tokens) == 2


def test_who_is_not_in_a_forward_loses_nothing_when_its_seeding_fails(
    make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, hurt = make_prefill(), make_prefill()
    sound.open_two()
    sound.run_all()
    (_, expected) = sound.first_tokens
    reset, num_failures = SamplingState.reset, 1

    def fails_once(self: SamplingState, seeds: Sequence[RowStart]) -> None:
        nonlocal num_failures
        if num_failures:
            num_failures = 0
            raise MemoryError("planted")
        reset(self, seeds)

    monkeypatch.setattr(SamplingState, "reset", fails_once)
    hurt.open_two()
    hurt.run_all()
    assert hurt.first_tokens == [expected]
    assert hurt.failed_rows == [0]


def test_closing_closes_every_stream_although_a_forward_does_not_end(make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    prefill.open_two()
    prefill.device.on_synchronize = lambda device, event: None
    with pytest.raises(DeviceTimeout):
        prefill.engine.close()
    for stream in prefill.device.streams:
        with pytest.raises(StreamClosed):
            stream.enqueue(print)


class TargetOnALostDevice(FaultyTarget):
    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        raise DeviceLost("the device faulted")


def test_a_lost_device_ends_the_engine_and_fails_no_row_by_itself(tiny_target: Callable[[str], TargetModel]) -> None:
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
    make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reclaim() -> int:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    prefill = make_prefill()
    with monkeypatch.context() as patch:
        patch.setattr(prefill.device, "failure_for", lambda error: DeviceLost("the device faulted"))
        patch.setattr(prefill.engine.pool, "reclaim", reclaim)
        with pytest.raises(DeviceLost):
            prefill.step()
    prefill.close()
