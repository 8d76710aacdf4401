"""A container in which one unit of work on a stream passes a value to later ones."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

T = TypeVar("T")

_EMPTY = object()


class Cell(Generic[T]):
    """A value that one piece (a unit of work on a stream), or the engine's thread, sets once and later pieces read.

    Another thread may read it too, after it has seen an event done that was recorded on the stream after that piece. If
    the piece fails, later pieces of the same failure scope are skipped, so none of them reads an empty cell.
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: object = _EMPTY

    @property
    def is_set(self) -> bool:
        return self._value is not _EMPTY

    def set(self, value: T) -> None:
        assert self._value is _EMPTY, "the cell is set already"
        self._value = value

    def get(self) -> T:
        assert self._value is not _EMPTY, "the cell is read before the piece that sets it: a fence is missing"
        return cast(T, self._value)
