"""Prometheus metrics of speculative decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.telemetry.histogram import TOKEN_S, OneWriterHistogram
from common.telemetry.step_stats import StepStats

ACCEPT_LENGTH = range(1, 17)


class SpeculationMetrics:
    """The cost and the gain of drafting, observed at each step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._levels = OneWriterHistogram("baton_draft_levels", "Tokens ahead that a step drafted.", buckets=range(17))
        self._accept_lengths = _AcceptLengths()
        self._parts = {
            part: OneWriterHistogram(f"baton_{part}_seconds", f"{part} of a step.", buckets=TOKEN_S)
            for part in ("draft", "verify", "extend")
        }
        for histogram in (self._levels, self._accept_lengths, *self._parts.values()):
            registry.register(histogram)

    def on_step(self, stats: StepStats) -> None:
        if (speculation := stats.speculation) is None:
            return
        self._levels.observe(speculation.num_levels)
        if speculation.num_levels:
            self._accept_lengths.add(speculation.accept_lens)
        for part, histogram in self._parts.items():
            histogram.observe(getattr(speculation, f"{part}_s"))


class _AcceptLengths(Collector):
    """A histogram that observes all rows of a step at once. One `observe` per row would cost more than the rest of the
    step.
    """

    def __init__(self) -> None:
        self._num_rows: Counter[int] = Counter()

    def add(self, accept_lens: Sequence[int]) -> None:
        self._num_rows.update(accept_lens)

    def collect(self) -> Iterator[Metric]:
        num_rows = dict(self._num_rows)  # a copy: the engine's thread continues to count
        buckets = [(str(float(bound)), float(_num_within(num_rows, bound))) for bound in ACCEPT_LENGTH]
        buckets.append(("+Inf", float(sum(num_rows.values()))))
        family = HistogramMetricFamily("baton_accept_length", "Tokens that a step committed of a row.")
        family.add_metric([], buckets, sum_value=sum(length * num for length, num in num_rows.items()))
        yield family


def _num_within(num_rows: dict[int, int], bound: int) -> int:
    return sum(num for length, num in num_rows.items() if length <= bound)
