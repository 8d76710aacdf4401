"""The fused program finds the same largest logit of a row as `argmax`."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from baton_cpu.program.kernel.operations import find_largest

INFINITY, NAN = float("inf"), float("nan")


def found(logits: NDArray[np.float32]) -> int:
    return int(find_largest(logits.view(np.int32)))


@pytest.mark.parametrize(
    ("logits", "place"),
    [
        pytest.param([1, 3, 2], 1, id="one"),
        pytest.param([-3, -1, -2], 1, id="negative"),
        pytest.param([2, 5, 5, 1], 1, id="first-of-two"),
        pytest.param([-0.0, 0.0], 0, id="both-zeros-are-alike"),
        pytest.param([-1, 0.0, -0.0], 1, id="both-zeros-are-alike-the-other-way"),
        pytest.param([1, INFINITY, INFINITY], 1, id="infinity"),
        pytest.param([-INFINITY, -INFINITY], 0, id="nothing-to-choose"),
        pytest.param([1, NAN, INFINITY, NAN], 1, id="first-nan"),
        pytest.param([1, -NAN, 3], 1, id="nan-with-a-sign"),
    ],
)
def test_what_counts(logits: list[float], place: int) -> None:
    row = np.array(logits, np.float32)
    assert int(row.argmax()) == place
    assert found(row) == place


def test_rows_longer_than_a_block() -> None:
    numbers = np.random.default_rng(0)
    for size in (511, 512, 513, 5_000):
        rows = numbers.integers(-50, 50, (20, size)).astype(np.float32)  # with ties
        assert [found(row) for row in rows] == rows.argmax(axis=1).tolist()
