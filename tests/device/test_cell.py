"""Cells carry a value from one piece (unit of stream work) to a later one."""

from __future__ import annotations

import pytest

from common.device.cell import Cell


def test_a_cell_gives_back_what_was_set() -> None:
    cell: Cell[int | None] = Cell()
    assert not cell.is_set
    cell.set(None)
    assert cell.is_set
    assert cell.get() is None


def test_reading_before_the_piece_that_sets_is_a_missing_fence() -> None:
    with pytest.raises(AssertionError, match="fence"):
        Cell[int]().get()


def test_a_cell_is_set_once() -> None:
    cell: Cell[int] = Cell()
    cell.set(1)
    with pytest.raises(AssertionError, match="set already"):
        cell.set(2)
    assert cell.get() == 1
