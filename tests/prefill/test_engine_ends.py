"""How a prefill engine's forwards and the engine itself end: bounds, what a failure takes with it, closing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from common.device.errors import DeviceTimeout, StreamClosed
from common.device.scripted import ScriptedDevice
from common.model.sampling_params import ResolvedSampling
from common.model.sampling_state import RowSeed, SamplingState
from common.model.target import TargetModel
from common.wire.handoff import HandoffRow, PrebuiltBatch, RowFailed
from prefill_service.messages import FrameReady, OpenCall
from prefill_service.schedule.scheduler import PrefillEngine
from tests.support.faulty_target import FaultyTarget

CHUNK_TOKENS = 8
BOUND_S = 300.0


@dataclass
class Prefill:
    """An engine whose forwards hold one prompt of `CHUNK_TOKENS`, and run when the test says so."""

    target: FaultyTarget
    now_s: float = 0.0
    device: ScriptedDevice = field(default_factory=ScriptedDevice)
    frames: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = PrefillEngine(
            model=self.target,
            device=self.device,
            max_rows=4,
            max_kv_tokens=64,
            max_context_tokens=64,
            chunk_tokens=CHUNK_TOKENS,
            max_batch_tokens=CHUNK_TOKENS,
            clock=lambda: self.now_s,
            debug_checks=True,
        )

    def open(self) -> None:
        """Two prompts, and so two forwards, both launched."""
        rows = [
            HandoffRow(str(i), 0, tuple(range(10 * i, 10 * i + CHUNK_TOKENS)), CHUNK_TOKENS, sampling)
            for i, sampling in enumerate(ResolvedSampling(seed=i, max_tokens=4, temperature=5.0) for i in (3, 4))
        ]
        self.step(OpenCall("call", tuple(rows)))
        assert self.device.stream("forward").pending().count("forward") == 2

    def step(self, *commands: OpenCall) -> None:
        self.frames += [event.frame for event in self.engine.step(commands) if isinstance(event, FrameReady)]

    def run_first_forward(self) -> None:
        self.device.stream("forward").run_until(self.engine._in_flight[0].end)

    def first_tokens(self) -> list[tuple[int, int]]:
        """(row, token) of those that have one, once everything ran."""
        for _ in range(5):
            self.device.run_all()
            self.step()
        batches = [frame for frame in self.frames if isinstance(frame, PrebuiltBatch)]
        return [
            (row, token)
            for batch in batches
            for row, token in zip(batch.rows.tolist(), batch.first_token_ids.tolist(), strict=True)
        ]

    @property
    def failed_rows(self) -> list[int]:
        return [frame.row for frame in self.frames if isinstance(frame, RowFailed)]


MakePrefill = Callable[[], Prefill]


@pytest.fixture
def make_prefill(tiny_target: Callable[[str], TargetModel]) -> MakePrefill:
    return lambda: Prefill(FaultyTarget(tiny_target("llama")))


@pytest.mark.parametrize("fails", [False, True], ids=["well", "failed"])
def test_a_forward_has_its_time_from_when_the_one_before_it_ended(make_prefill: MakePrefill, fails: bool) -> None:
    prefill = make_prefill()
    prefill.target.fails = lambda batch: fails
    prefill.open()
    prefill.now_s = BOUND_S - 1
    prefill.run_first_forward()
    prefill.step()
    assert prefill.failed_rows == ([0] if fails else [])
    prefill.now_s = 2 * BOUND_S - 2
    prefill.step()
    prefill.now_s = 2 * BOUND_S
    with pytest.raises(DeviceTimeout):
        prefill.step()


def test_who_is_not_in_a_forward_loses_nothing_when_its_seeding_fails(
    make_prefill: MakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, hurt = make_prefill(), make_prefill()
    sound.open()
    (_, expected) = sound.first_tokens()
    reset, num_failures = SamplingState.reset, 1

    def fails_once(self: SamplingState, seeds: Sequence[RowSeed]) -> None:
        nonlocal num_failures
        if num_failures:
            num_failures = 0
            raise MemoryError("planted")
        reset(self, seeds)

    monkeypatch.setattr(SamplingState, "reset", fails_once)
    hurt.open()
    assert hurt.first_tokens() == [expected]
    assert hurt.failed_rows == [0]


def test_closing_closes_every_stream_although_a_forward_does_not_end(make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    prefill.open()
    prefill.device.on_synchronize = lambda device, event: None
    with pytest.raises(DeviceTimeout):
        prefill.engine.close()
    for stream in prefill.device.streams:
        with pytest.raises(StreamClosed):
            stream.enqueue(print)
