"""What a mutant is: the engine with one rule taken out. Each must make the rule's check fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Check = Callable[[], None]
Mutant = Callable[[pytest.MonkeyPatch], None]


def name_of(value: object) -> str:
    """Test ids: a check's or a mutant's name; nothing for a symptom."""
    return getattr(value, "__name__", "-")
