"""Cells carry a value from one piece (unit of stream work) to a later one."""

from __future__ import annotations

import pytest

from common.device.stream import Cell


def test_a_cell_is_set_once_and_gives_back_what_was_set() -> None:
    cell: Cell[int | None] = Cell()
    with pytest.raises(AssertionError, match="fence"):
        cell.get()
    cell.set(None)
    with pytest.raises(AssertionError, match="set already"):
        cell.set(2)
    assert cell.is_set and cell.get() is None
