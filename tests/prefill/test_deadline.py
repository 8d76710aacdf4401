"""Tests that a prompt whose deadline passed while it was queued is not computed."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import RowFailure
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.wire.handoff import HandoffRow
from prefill_service.messages import OpenCall
from tests.support.engines import PrefillHalf


def test_a_late_prompt_fails_before_it_is_given_a_row(tiny_target: Callable[[str], TargetModel]) -> None:
    now_s = 1000.0
    prefill = PrefillHalf(tiny_target("llama"), max_rows=1, wall_clock=lambda: now_s)
    sampling = ResolvedSampling(seed=1, max_tokens=4)
    rows = tuple(
        HandoffRow(f"r{ms}", 0, (11, 12, 13), 3, sampling, deadline_unix_ms=ms)
        for ms in (1_000_001, 1_000_000, 999_999)
    )
    prefill.step(OpenCall("call", rows))
    assert [(failed.row, failed.reason, failed.retryable) for failed in prefill.failures] == [
        (1, RowFailure.DEADLINE, False),
        (2, RowFailure.DEADLINE, False),
    ]
    assert not prefill.ended_calls, "the first row is still alive"
    assert prefill.engine.load().rows.free == 0
    prefill.close()
