"""How a model's forwards are computed, where there is a faster way for those that it takes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ForwardCounts:
    """A model's forwards since it has a program: those that this computed, and those that it does not take, which the
    model's operators computed. One thread counts, any may read.
    """

    num_fused: int = 0
    num_declined: int = 0

    def count(self, *, is_taken: bool) -> bool:
        """Returns what it was told."""
        if is_taken:
            self.num_fused += 1
        else:
            self.num_declined += 1
        return is_taken
