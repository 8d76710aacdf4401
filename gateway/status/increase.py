"""Computes how much a service's counters grew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from gateway.status.exposition import Exposition, Labels
from gateway.status.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Increase:
    """The growth of counters between two samples, by name and labels."""

    by_name: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def between(cls, earlier: Exposition, later: Exposition) -> Self:
        """Returns the growth from an earlier to a later exposition of one service.

        If any counter shrank, the service has restarted; then the growth is counted from 0.
        """
        has_restarted = any(later.counters.get(key, 0.0) < value for key, value in earlier.counters.items())
        before = {} if has_restarted else earlier.counters
        by_name: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        for key, value in later.counters.items():
            name, labels = key
            by_name[name][labels] = value - before.get(key, 0.0)
        return cls(dict(by_name))

    @classmethod
    def sum(cls, increases: Iterable[Increase]) -> Self:
        total: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        for increase in increases:
            for name, by_labels in increase.by_name.items():
                of_name = total[name]
                for labels, value in by_labels.items():
                    of_name[labels] += value
        return cls(dict(total))

    def since(self, earlier: Increase) -> Increase:
        """Returns the growth after the end of `earlier`, which must have started at the same sample as this one."""
        nothing: Mapping[Labels, float] = {}
        return Increase(
            {
                name: {
                    labels: value - earlier.by_name.get(name, nothing).get(labels, 0.0) for labels, value in of.items()
                }
                for name, of in self.by_name.items()
            }
        )

    def total(self, name: str) -> float:
        """Returns the growth of `name`, summed over all labels."""
        return sum(self.by_name.get(name, {}).values())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Returns the growth of `name` for each value of `label`. Values without growth are left out."""
        return {
            dict(labels)[label]: value
            for labels, value in self.by_name.get(name, {}).items()
            if value and label in dict(labels)
        }

    def histogram(self, name: str) -> Histogram:
        of_name = self.by_name.get(f"{name}_bucket", {})
        buckets = sorted((float(dict(labels)["le"]), value) for labels, value in of_name.items())
        return Histogram(tuple(buckets), self.total(f"{name}_sum"))
