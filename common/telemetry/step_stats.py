"""What an engine tells about each finished step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """One finished step: requests in its batch, tokens its forward computed, seconds from launch until its results."""

    batch_size: int
    num_tokens: int
    step_s: float
