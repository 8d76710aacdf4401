"""The command to drain, which both engines take. Messages import it, so it must not import the engines' libraries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drain:
    """A command: makes the engine refuse what is new, as retryable, and finish the rest."""
