"""A Prometheus histogram for frequent events: an observation is two additions, without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import core
from prometheus_client.registry import Collector

PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
BATCH_SIZE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


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
