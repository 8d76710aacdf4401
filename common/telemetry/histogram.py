"""A Prometheus histogram for frequent events: an observation is two additions, without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import core
from prometheus_client.registry import Collector


class OneWriterHistogram(Collector):
    """A histogram that one thread writes. Sums are computed at each scrape, on any thread. Its creator must register
    it.
    """

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float]) -> None:
        """Makes an empty histogram. `buckets` are ascending upper bounds; an unbounded bucket is added."""
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += num_times
        self._sum += value * num_times

    def describe(self) -> Iterator[core.Metric]:
        """Gives the registry the metric's name, so that it refuses a duplicate and can find the histogram."""
        yield core.HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[core.Metric]:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = [float(count) for count in accumulate(self._counts)]
        family = core.HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], list(zip(bounds, counts, strict=True)), sum_value=self._sum)
        yield family
