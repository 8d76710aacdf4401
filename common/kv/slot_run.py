"""Slots that follow each other, as those that the allocator hands out together mostly do."""

from __future__ import annotations

from collections.abc import Sequence


def run_of(slots: Sequence[int]) -> slice | None:
    """The range that these slots are, in their order; None when they are none.

    To copy a range is some two times as fast as to copy slots by an index.
    """
    start, stop = slots[0], slots[0] + len(slots)
    return slice(start, stop) if list(slots) == list(range(start, stop)) else None
