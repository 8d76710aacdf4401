"""Parses the metrics that a service exposes, in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "baton_"
_MONOTONIC = ("counter", "histogram")

Labels = tuple[tuple[str, str], ...]
"""Pairs of a label's name and value, sorted."""
Series = tuple[str, Labels]
"""Identifies a time series: the sample's name and its labels."""


@dataclass(frozen=True, slots=True)
class Exposition:
    """The metrics that a service exposed at one moment, by series.

    `counters` only grow while the process lives; they include the buckets, sums and counts of histograms.
    """

    counters: Mapping[Series, float]
    gauges: Mapping[Series, float]

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.gauges.get(series(name, **labels))

    def has(self, name: str) -> bool:
        return any(name == each for each, _ in (*self.counters, *self.gauges))


def series(name: str, **labels: str) -> Series:
    return name, tuple(sorted(labels.items()))


def parse_exposition(text: str) -> Exposition:
    """Parses Baton's metrics in `text`. Raises ValueError if the format is wrong or if there is none of them."""
    counters: dict[Series, float] = {}
    gauges: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        values = counters if family.type in _MONOTONIC else gauges
        for sample in family.samples:
            if not math.isfinite(sample.value) or sample.value < 0:
                raise ValueError(f"{sample.name} is {sample.value}")
            if sample.name.endswith("_bucket") and math.isnan(float(sample.labels.get("le", "nan"))):
                raise ValueError(f"{sample.name} has no bound")
            values[series(sample.name, **sample.labels)] = sample.value
    if not counters and not gauges:
        raise ValueError(f"no metric begins with {PREFIX}")
    return Exposition(counters, gauges)
