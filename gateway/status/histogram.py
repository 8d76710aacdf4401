"""Computes quantiles of Prometheus histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative histogram.

    `buckets` are pairs of an upper bound and the number of observations at or below it, ascending; the last bound is
    infinite.
    """

    buckets: tuple[tuple[float, float], ...]
    sum: float

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Estimates a quantile by interpolation within its bucket. `share` is between 0 and 1.

        Returns None if there are no observations.
        The first bucket begins at 0. Values above the last finite bound count as that bound.
        """
        if not self.count:
            return None
        rank = share * self.count
        lower, num_below = 0.0, 0.0
        for upper, num_upto in self.buckets:
            if num_upto >= rank and num_upto > num_below:
                if math.isinf(upper):
                    return lower
                return lower + (upper - lower) * (rank - num_below) / (num_upto - num_below)
            lower, num_below = upper, num_upto
        return lower

    def num_upto(self, bound: float) -> float:
        """Returns the number of observations that are known to be at or below `bound`."""
        return max((count for upper, count in self.buckets if upper <= bound), default=0.0)


def merge(histograms: Sequence[Histogram]) -> Histogram:
    """Returns one histogram with all observations. The histograms may have different bounds.

    The result has the bounds of all of them. Where a histogram lacks a bound, its count at the next lower one is used.
    """
    bounds = sorted({upper for each in histograms for upper, _ in each.buckets})
    return Histogram(
        tuple((bound, sum(each.num_upto(bound) for each in histograms)) for bound in bounds),
        sum(each.sum for each in histograms),
    )
