"""Tests that the schedule side of a step meets its bounds, on its time at the largest batch and on its growth with the
batch, and that the prefix tree's operations for one row meet theirs.
"""

from __future__ import annotations

import pytest

from benchmarks.machine import CoreSpeed
from benchmarks.schedule_rig import STEPS_A_TURN, ScheduleRig
from benchmarks.schedule_side import CHAIN, Cost, judged
from benchmarks.tree_costs import BOUND_US, TreeCost, tree_table
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo


def cost(batch_size: int, total_us: float, mean_us: float | None = None) -> Cost:
    mean_us = total_us if mean_us is None else mean_us
    return Cost(batch_size, batch_size, total_us, total_us, total_us, mean_us, {}, 0.0, CoreSpeed())


@pytest.mark.parametrize(
    ("totals_us", "is_met"),
    [
        ({1: 300.0, 256: 900.0}, True),
        ({1: 300.0, 256: 1100.0}, False),
        ({1: 2.0, 256: 600.0}, False),  # more than linear
    ],
)
def test_both_bounds_are_judged(totals_us: dict[int, float], is_met: bool) -> None:
    verdict, found = judged([cost(size, total_us) for size, total_us in totals_us.items()])
    assert found == is_met
    assert verdict.endswith("met." if is_met else "MISSED.")


def test_one_size_alone_is_judged_by_its_time() -> None:
    assert judged([cost(256, 900.0, 1100.0)]) == ("0.90 ms at 256 rows (1.10 in the mean), at most 1 ms: met.", True)
    assert judged([cost(256, 1100.0)])[1] is False


@pytest.mark.parametrize("spec_info", [NO_DRAFTS, CHAIN], ids=["plain", "chain"])
def test_rows_that_are_replaced_share_and_evict_what_is_cached(spec_info: SpecInfo) -> None:
    rig = ScheduleRig(num_rows=2, spec_info=spec_info, output_tokens=8, num_cached_tokens=3000)
    rig.start()
    for _ in range(30):
        rig.step()
    assert len(rig.watch.seconds["edge"]) * STEPS_A_TURN == 30
    prefixes, slots = rig.load().prefixes, rig.load().slots
    rig.close()
    assert prefixes.num_found > 0 and prefixes.num_evicted > 0
    assert slots.cached > 2000


@pytest.mark.parametrize(("us", "is_met"), [(BOUND_US, True), (BOUND_US + 1, False)])
def test_the_tree_is_judged_by_what_an_operation_takes_for_a_row(us: float, is_met: bool) -> None:
    lines, found = tree_table([TreeCost(1, {"match": 1.0, "evict": 2.0}), TreeCost(8, {"match": 8 * us, "evict": 1.0})])
    assert found == is_met
    assert lines[-1].endswith("met." if is_met else "MISSED.")
