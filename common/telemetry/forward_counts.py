"""Counts how a model's forwards are computed, if a faster program takes some of them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ForwardCounts:
    """Forwards since the model has a program: those that the program computed, and those that it declined and operators
    computed. One thread counts; any thread may read.
    """

    num_fused: int = 0
    num_declined: int = 0

    def count(self, *, is_taken: bool) -> bool:
        """Count a forward. Returns its argument."""
        if is_taken:
            self.num_fused += 1
        else:
            self.num_declined += 1
        return is_taken
