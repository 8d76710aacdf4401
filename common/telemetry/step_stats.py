"""What an engine reports about one step. Standard library only: engines import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """A speculative step: levels drafted, tokens committed for each drafting row, and seconds of its parts.

    `idle_s` is how long the stream waited for this step after the one before; None if that one had ended at its launch.
    """

    num_levels: int
    accept_lens: tuple[int, ...]
    draft_s: float
    verify_s: float
    extend_s: float
    idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One forward: rows in it, tokens it computed, and the time between its launch and its result."""

    batch_size: int
    num_tokens: int
    step_s: float
    speculation: SpeculationStats | None = None


OnStep = Callable[[StepStats], None]
