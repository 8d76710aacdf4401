"""Tests that StepTimes compares each step with drafts to the steps next to it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest

from common.telemetry.stats import SpeculationStats
from decode_service.speculate.spec_info import MAX_UNREAD, SpecInfo, Unread
from decode_service.speculate.step_times import StepTimes

DEEPEST = SpecInfo.chain(3)
SECONDS = (0.010, 0.015, 0.025, 0.040)
"""The time that a step of each depth takes on an otherwise idle machine."""


def measured(
    depths: Iterable[int], *, num_rows: int = 8, pace: float = 1.0, idle_s: float = 0.0, times: StepTimes | None = None
) -> StepTimes:
    """Observes one step of each depth, `pace` times as long as usual. After a step that drafts, the stream is idle for
    `idle_s`.
    """
    times = times or StepTimes(num_levels=DEEPEST.num_steps)
    drafted_before = False
    for depth in depths:
        draft_s, extend_s = (0.002, 0.001) if depth else (0.0, 0.0)
        stats = SpeculationStats(
            depth,
            (1,) * num_rows,
            draft_s=pace * draft_s,
            verify_s=pace * (SECONDS[depth] - draft_s - extend_s),
            extend_s=pace * extend_s,
            idle_s=pace * idle_s if drafted_before else None,
        )
        times.add(DEEPEST.at_depth(depth), unread=Unread(np.zeros(num_rows, np.int64)), stats=stats)
        drafted_before = depth > 0
    return times


def quotient(times: StepTimes, depth: int, num_rows: int = 8) -> float:
    return times.steps_s(num_rows)[depth] / times.steps_s(num_rows)[0]


ALL_MET = (0, 1, 2, 3, 0)


def test_a_depth_that_was_measured_while_the_machine_was_slow_is_as_good_as_ever() -> None:
    times = measured([*ALL_MET, 0, 0, 0])
    measured([0, 1, 0, 0], pace=3.0, times=times)
    measured([0] * 20, times=times)
    assert quotient(times, 1) == pytest.approx(1.5)
    measured([0] * 20, pace=3.0, times=times)
    assert quotient(times, 1) == pytest.approx(1.5)


def test_a_step_that_the_clock_did_not_see_is_passed_over() -> None:
    times = measured([*ALL_MET, 0, 0, 0])
    before = times.steps_s(8)
    measured([0, 1, 0], pace=0.0, times=times)
    measured([1, 0], times=times)
    assert times.steps_s(8) == before


def test_one_slow_step_among_several_decides_nothing() -> None:
    times = measured([*ALL_MET, 1, 0, 1, 0, 0])
    measured([1], pace=10.0, times=times)
    measured([0, 0], times=times)
    assert quotient(times, 1) == pytest.approx(1.5)


def test_the_first_step_of_a_depth_with_so_many_rows_does_not_count() -> None:
    times = measured([0, 0, 0])
    measured([1], pace=10.0, times=times)
    measured([0, 0], times=times)
    assert not times.has(1, 8)
    assert times.steps_s(8)[1] == math.inf
    measured([1, 0, 0], times=times)
    assert quotient(times, 1) == pytest.approx(1.5)
    assert not times.has(1, 8)
    measured([1, 0, 0], times=times)
    assert times.has(1, 8)


def test_the_first_time_that_the_head_reads_so_many_tokens_does_not_count() -> None:
    times = measured([0] * 4)
    for seconds in (1000.0, 0.1, 0.2):
        stats = SpeculationStats(0, (1,) * 8, draft_s=0.0, verify_s=0.010, extend_s=seconds)
        times.add(DEEPEST.at_depth(0), unread=Unread(np.full(8, 99)), stats=stats)
    assert times.read_s(800) == pytest.approx(0.1)


def test_steps_of_other_numbers_of_rows_are_not_compared() -> None:
    times = measured([*ALL_MET])
    measured([*ALL_MET], num_rows=32, times=times)
    for _ in range(4):
        measured([0, 0], num_rows=8, times=times)
        measured([1], num_rows=32, pace=5.0, times=times)
    assert not times.has(1, 8)
    assert not times.has(1, 32)


def test_two_depths_with_drafts_are_not_compared() -> None:
    times = measured([*ALL_MET, 0, 1, 2, 1, 2, 3, 1, 1])
    assert quotient(times, 1) == pytest.approx(1.5)
    assert times.steps_s(8)[2] == times.steps_s(8)[3] == math.inf
    measured([2, 0, 3, 0, 0], times=times)
    assert [quotient(times, depth) for depth in (1, 2, 3)] == pytest.approx([1.5, 2.5, 4.0])


def test_drafts_never_make_a_step_shorter() -> None:
    times = measured([*ALL_MET, 0])
    measured([1], pace=0.2, times=times)
    measured([0, 0], times=times)
    assert quotient(times, 1) == pytest.approx(1.0)


def test_the_wait_behind_a_step_with_drafts_is_its_own() -> None:
    times = measured([*ALL_MET, 0, 0])
    measured([0, 1, 0, 0, 1, 0, 0], idle_s=0.005, times=times)
    assert quotient(times, 1) == pytest.approx(2.0)


def test_between_numbers_of_rows_a_line_is_drawn() -> None:
    times = measured([*ALL_MET, 0, 1, 0, 0], num_rows=8)
    measured([*ALL_MET, 0, 0], num_rows=32, times=times)
    times.add(
        DEEPEST.at_depth(1), unread=Unread(np.zeros(32, np.int64)), stats=SpeculationStats(1, (1,), 0.0, 0.045, 0.0)
    )
    measured([0, 0], num_rows=32, times=times)
    assert [quotient(times, 1, num_rows) for num_rows in (4, 8, 20, 32, 64)] == pytest.approx([1.5, 1.5, 3.0, 4.5, 4.5])


def test_steps_without_drafts_are_charged_what_the_head_reads_for_want_of_room() -> None:
    times = measured([0] * 4)
    without = DEEPEST.at_depth(0).without_seed()
    plain = SpeculationStats(0, (1,) * 8, draft_s=0.0, verify_s=0.010, extend_s=0.0)
    catching_up = SpeculationStats(0, (1,) * 8, draft_s=0.0, verify_s=0.010, extend_s=0.128)
    voluntary = SpeculationStats(0, (1,) * 8, draft_s=0.0, verify_s=0.010, extend_s=1.0)
    for _ in range(2):
        for lag in range(MAX_UNREAD - 1):
            times.add(without, unread=Unread(np.full(8, lag)), stats=plain)
        times.add(DEEPEST.at_depth(0), unread=Unread(np.full(8, 100)), stats=voluntary)
        times.add(DEEPEST.at_depth(0), unread=Unread(np.full(8, MAX_UNREAD - 1)), stats=catching_up)
    assert times.steps_s(8)[0] == pytest.approx(0.011)
    assert times.read_s(8 * MAX_UNREAD) == pytest.approx(0.128)
    assert times.read_s(16 * MAX_UNREAD) == pytest.approx(0.256)


def test_what_was_found_before_does_not_outlast_more_steps() -> None:
    times = measured([*ALL_MET, 0, 0, 0])
    before = [times.steps_s(num_rows)[0] for num_rows in (8, 12)]
    measured([0] * 20, pace=3.0, times=times)
    assert [times.steps_s(num_rows)[0] for num_rows in (8, 12)] == pytest.approx([3 * seconds for seconds in before])
