"""A histogram for what happens every few milliseconds: an observation is two additions, and takes no lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import core
from prometheus_client.registry import Collector


class OneWriterHistogram(Collector):
    """To be registered by who makes it. One thread observes; it is added up when Prometheus asks, on any thread."""

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float]) -> None:
        """`buckets`: upper bounds, ascending; one without a bound is added."""
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += num_times
        self._sum += value * num_times

    def describe(self) -> Iterator[core.Metric]:
        """So that the registry knows its names: it refuses a second of one, and finds it by any."""
        yield core.HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[core.Metric]:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = [float(count) for count in accumulate(self._counts)]
        family = core.HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], list(zip(bounds, counts, strict=True)), sum_value=self._sum)
        yield family
