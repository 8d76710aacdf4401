"""Tests that footprints record which slots, rows or elements code touches, by whatever operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.device.stream import Cell
from tests.interleavings.footprint import Footprint, Memory


def watched(touch: Callable[[Tensor], object], *, unit_dim: int | None = 0) -> tuple[list[object], list[object]]:
    """Returns the indices that `touch` reads, and those that it writes, in a buffer of shape [4, 2]."""
    footprint, table = Footprint(), torch.zeros((4, 2), dtype=torch.int64)
    memory = Memory(lambda: footprint, lambda: "me")
    memory.name(table, "table", unit_dim=unit_dim)
    with memory.watching():
        touch(table)
    return tuple(  # type: ignore[return-value]
        sorted(unit[1] for unit in units if isinstance(unit, tuple) and unit[0] == "table")
        for units in (footprint.reads, footprint.writes)
    )


@pytest.mark.parametrize(
    ("touch", "reads", "writes"),
    [
        pytest.param(lambda table: table[1].tolist(), [1], [], id="tolist"),
        pytest.param(lambda table: table[1:3].numpy().sum(), [1, 2], [], id="numpy"),
        pytest.param(lambda table: table[torch.tensor([0, 3])], [0, 3], [], id="index"),
        pytest.param(lambda table: table.index_select(0, torch.tensor([2])), [2], [], id="index_select"),
        pytest.param(
            lambda table: table.__setitem__(torch.tensor([0, 3]), torch.ones((2, 2), dtype=torch.int64)),
            [],
            [0, 3],
            id="index_put",
        ),
        pytest.param(lambda table: table[2].fill_(7), [], [2], id="in place through a view"),
        pytest.param(lambda table: table[3].copy_(table[0]), [0], [3], id="copy"),
    ],
)
def test_only_the_rows_that_are_touched_are_noted(
    touch: Callable[[Tensor], object], reads: list[int], writes: list[int]
) -> None:
    assert watched(touch) == (reads, writes)


def test_without_a_dimension_every_element_counts() -> None:
    assert watched(lambda table: table[1, 1:].tolist(), unit_dim=None) == ([3], [])


def test_a_cell_is_one_place() -> None:
    footprint, cell = Footprint(), Cell[int]()
    memory = Memory(lambda: footprint, lambda: "me")
    with memory.watching():
        cell.set(1)
        assert not footprint.reads and len(footprint.writes) == 1
        assert cell.get() == 1
    assert footprint.reads == footprint.writes


def test_what_the_test_itself_computes_is_not_noted() -> None:
    footprint, table = Footprint(), torch.zeros(3)
    memory = Memory(lambda: footprint, lambda: "me")
    memory.name(table, "table", unit_dim=0)
    with memory.watching(), memory.paused():
        assert table.tolist() == [0, 0, 0] and float((table + 1).sum()) == 3
    assert not footprint.reads and not footprint.writes
