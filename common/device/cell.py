"""How pieces pass values to each other."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

T = TypeVar("T")

_EMPTY = object()


class Cell(Generic[T]):
    """Set once by one piece; read by later pieces of its stream, or by anyone behind an event recorded after it.

    When the setting piece fails, later pieces of its scope do not run, so none meets an empty cell.
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
