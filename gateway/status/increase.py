"""How much a service's counters grew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from gateway.status.exposition import Exposition, Series
from gateway.status.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Increase:
    """By series, what was counted between two samples."""

    by_series: Mapping[Series, float]

    @classmethod
    def between(cls, earlier: Exposition, later: Exposition) -> Self:
        """A counter that shrank shows a new process, all of whose counters then began at 0."""
        has_restarted = any(later.counters.get(key, 0.0) < value for key, value in earlier.counters.items())
        before = {} if has_restarted else earlier.counters
        return cls({key: value - before.get(key, 0.0) for key, value in later.counters.items()})

    @classmethod
    def sum(cls, increases: Iterable[Increase]) -> Self:
        total: defaultdict[Series, float] = defaultdict(float)
        for increase in increases:
            for key, value in increase.by_series.items():
                total[key] += value
        return cls(dict(total))

    def total(self, name: str) -> float:
        """Of `name`, whatever its labels."""
        return sum(value for (each, _), value in self.by_series.items() if each == name)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Of `name`, by its label's value; what did not grow is left out."""
        return {
            dict(labels)[label]: value
            for (each, labels), value in self.by_series.items()
            if each == name and value and label in dict(labels)
        }

    def histogram(self, name: str) -> Histogram:
        buckets = sorted(
            (float(dict(labels)["le"]), value)
            for (each, labels), value in self.by_series.items()
            if each == f"{name}_bucket"
        )
        return Histogram(tuple(buckets), self.total(f"{name}_sum"))
