"""Slots that follow each other, as those that the allocator hands out together mostly do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def run_of(slots: Sequence[int] | NDArray[np.int64]) -> slice | None:
    """The range that these slots are, in their order; None when they are none.

    To copy a range is some two times as fast as to copy slots by an index.
    """
    numbers = np.asarray(slots)
    start = int(numbers[0])
    stop = start + len(numbers)
    return slice(start, stop) if (numbers == np.arange(start, stop)).all() else None
