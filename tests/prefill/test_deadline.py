"""A prompt whose deadline passed while it was queued is not computed."""

from __future__ import annotations

from collections.abc import Callable

from common.device.factory import open_device
from common.errors import RowFailure
from common.model.sampling_params import ResolvedSampling
from common.model.target import TargetModel
from common.wire.handoff import HandoffRow, RowFailed
from prefill_service.messages import CallDone, FrameReady, OpenCall
from prefill_service.schedule.scheduler import PrefillEngine


def test_a_late_prompt_fails_before_it_is_given_a_row(tiny_target: Callable[[str], TargetModel]) -> None:
    now_s = 1000.0
    engine = PrefillEngine(
        model=tiny_target("llama"),
        device=open_device("cpu", num_threads=1),
        max_rows=1,
        max_kv_tokens=64,
        max_context_tokens=64,
        wall_clock=lambda: now_s,
        debug_checks=True,
    )
    sampling = ResolvedSampling(seed=1, max_tokens=4)
    rows = tuple(
        HandoffRow(f"r{ms}", 0, (11, 12, 13), 3, sampling, deadline_unix_ms=ms)
        for ms in (1_000_001, 1_000_000, 999_999)
    )
    events = engine.step([OpenCall("call", rows)])
    failed = [event.frame for event in events if isinstance(event, FrameReady) and isinstance(event.frame, RowFailed)]
    assert [(frame.row, frame.reason, frame.retryable) for frame in failed] == [
        (1, RowFailure.DEADLINE, False),
        (2, RowFailure.DEADLINE, False),
    ]
    assert not any(isinstance(event, CallDone) for event in events), "the first row is still alive"
    assert engine.load().rows.free == 0
    engine.close()
