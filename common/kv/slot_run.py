"""Recognises adjacent slots, which the allocator mostly hands out together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def run_of(slots: Sequence[int] | NDArray[np.int64]) -> slice | None:
    """The slots as a range, if they are adjacent and in order, else None.

    Copying a range is about twice as fast as copying by an index.
    """
    numbers = np.asarray(slots)
    start = int(numbers[0])
    stop = start + len(numbers)
    return slice(start, stop) if (numbers == np.arange(start, stop)).all() else None
