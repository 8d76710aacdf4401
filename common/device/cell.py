"""How pieces of stream work pass values to each other."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

T = TypeVar("T")

_EMPTY = object()


class Cell(Generic[T]):
    """Set once by one piece. Later pieces of its stream read it, and so may anyone after an event recorded later.

    If the setting piece fails, later pieces of its scope do not run, so none of them reads an empty cell.
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
