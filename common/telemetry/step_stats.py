"""What an engine tells about one step. Standard library only: engines import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """One forward: rows in it, tokens it computed, and the time between its launch and its result."""

    batch_size: int
    num_tokens: int
    step_s: float


OnStep = Callable[[StepStats], None]
