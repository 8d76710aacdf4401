"""The metrics of several edges, as sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_Key = tuple[str, tuple[tuple[str, str], ...]]


class EdgeMetrics(Collector):
    """Sums what the edges said last. Counts of an edge that has ended are kept. Any thread may read it."""

    def __init__(self) -> None:
        self._said: dict[int, Sequence[Metric]] = {}
        self._ended: Sequence[Metric] = ()

    def said(self, number: int, metrics: Sequence[Metric]) -> None:
        self._said = {**self._said, number: metrics}

    def ended(self, number: int) -> None:
        """Keeps an ended edge's counts. Another process may get its `number`."""
        said = dict(self._said)
        self._ended = tuple(_sums([self._ended, said.pop(number, ())]))
        self._said = said

    def collect(self) -> Iterator[Metric]:
        return _sums([self._ended, *self._said.values()])


def _sums(edges: Iterable[Sequence[Metric]]) -> Iterator[Metric]:
    metrics: dict[str, Metric] = {}
    sums: dict[str, dict[_Key, Sample]] = {}
    for edge in edges:
        for metric in edge:
            metrics.setdefault(metric.name, metric)
            of_metric = sums.setdefault(metric.name, {})
            for sample in metric.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                before = of_metric.get(key)
                # The time when a counter was made is that of the first one.
                combine = min if sample.name.endswith("_created") else sum
                value = sample.value if before is None else combine((before.value, sample.value))
                of_metric[key] = sample._replace(value=value)
    for name, first in metrics.items():
        total = Metric(name, first.documentation, first.type, first.unit)
        total.samples = list(sums[name].values())
        yield total
