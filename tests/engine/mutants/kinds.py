"""What a mutant is: the engine with one rule taken out. Each must make the rule's check fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Check = Callable[[], None]
Mutant = Callable[[pytest.MonkeyPatch], None]


def see_it_fail(check: Check, mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mutant the check must fail, and say why."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        check()


def name_of(value: object) -> str:
    """Test ids: a check's or a mutant's name; nothing for a symptom."""
    return getattr(value, "__name__", "-")
