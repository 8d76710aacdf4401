"""Tests that slots which form a range may be copied as one block, and that the same slots in another order may not."""

from __future__ import annotations

import pytest

from common.kv.slot_allocator import run_of


@pytest.mark.parametrize(
    ("slots", "run"),
    [
        ([4, 5, 6], slice(4, 7)),
        ([9], slice(9, 10)),
        ([4, 6], None),
        ([6, 5, 4], None),
        ([4, 6, 5], None),
        ([5, 4, 6], None),
    ],
)
def test_only_slots_that_follow_each_other_are_a_run(slots: list[int], run: slice | None) -> None:
    assert run_of(slots) == run
