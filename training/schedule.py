"""The learning-rate schedule: warm-up, constant, linear decay. Only the decay depends on the run's length."""

from __future__ import annotations

from dataclasses import dataclass

_FLOOR = 0.02


@dataclass(frozen=True, slots=True)
class Schedule:
    """The phases of the learning rate, measured in answer tokens."""

    warmup_tokens: int
    decay_start: int
    max_tokens: int

    def factor(self, num_tokens: int) -> float:
        """Returns the factor for the learning rates of a training step after which `num_tokens` answer tokens have been
        seen.
        """
        if num_tokens < self.warmup_tokens:
            return num_tokens / self.warmup_tokens
        if num_tokens <= self.decay_start or self.decay_start == self.max_tokens:
            return 1.0
        left = max(0.0, (self.max_tokens - num_tokens) / (self.max_tokens - self.decay_start))
        return _FLOOR + (1 - _FLOOR) * left
