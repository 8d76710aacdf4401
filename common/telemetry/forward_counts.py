"""Counts a model's forwards by how they were computed: by a program or by operators. Uses the standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ForwardCounts:
    """The number of a model's forwards since it got a program (a faster way to compute them).

    `num_fused` were computed by the program. `num_declined` were computed by operators, because the program declined
    them. One thread counts; any thread may read.
    """

    num_fused: int = 0
    num_declined: int = 0

    def count(self, *, is_taken: bool) -> bool:
        """Counts one forward, and returns `is_taken`: whether the program computes it."""
        if is_taken:
            self.num_fused += 1
        else:
            self.num_declined += 1
        return is_taken
