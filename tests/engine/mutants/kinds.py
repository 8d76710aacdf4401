"""What a mutant is: the engine with one rule taken out. Each must make the rule's check fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

Check = Callable[[], None]
Mutant = Callable[[pytest.MonkeyPatch], None]


def see_it_fail(check: Check, mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mutant the check must fail, and say why."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        check()


def arguments_given(patch: pytest.MonkeyPatch, kind: type) -> Callable[[object], Mapping[str, Any]]:
    """From now on, the keyword arguments with which each object of `kind` was made."""
    made: dict[int, tuple[object, Mapping[str, Any]]] = {}  # with the object, whose identity is then not used again
    init = kind.__init__  # type: ignore[misc]

    def noting(self: object, **arguments: Any) -> None:
        made[id(self)] = self, arguments
        init(self, **arguments)

    patch.setattr(kind, "__init__", noting)
    return lambda it: made[id(it)][1]


def name_of(value: object) -> str:
    """Test ids: a check's or a mutant's name; nothing for a symptom."""
    return getattr(value, "__name__", "-")
