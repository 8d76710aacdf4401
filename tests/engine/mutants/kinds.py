"""The type of a mutant: a function that takes one rule out of the engine. The rule's check must fail with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

Check = Callable[[], None]
Mutant = Callable[[pytest.MonkeyPatch], None]


def see_it_fail(check: Check, mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies the mutant, and requires that the check then fails with a message that matches `symptom`."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        check()


def arguments_given(patch: pytest.MonkeyPatch, kind: type) -> Callable[[object], Mapping[str, Any]]:
    """Records the keyword arguments with which each object of `kind` is built from now on. Returns a function that
    looks them up for an object.
    """
    made: dict[int, tuple[object, Mapping[str, Any]]] = {}  # keeps the object too, so that its id is not reused
    init = kind.__init__  # type: ignore[misc]

    def noting(self: object, **arguments: Any) -> None:
        made[id(self)] = self, arguments
        init(self, **arguments)

    patch.setattr(kind, "__init__", noting)
    return lambda it: made[id(it)][1]


def name_of(value: object) -> str:
    """Returns a test id: the name of a check or a mutant, and "-" for a symptom."""
    return getattr(value, "__name__", "-")
