"""Prometheus metrics of a process's role, together with the metrics of whatever serves in this role now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

ROLES = ("prefill", "decode")
OUTCOMES = ("changed", "failed")
READY = "baton_ready"


class RoleMetrics(Collector):
    """Exposes the role, and the metrics in `of_role`, a registry that is new for each time in a role.

    The metrics of a role begin at 0 whenever the role does, as after a restart; only the counts of forwards are those
    of the models, which stay. While no role serves, "not ready" is exposed.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._role = ""
        self._num_changes: Counter[str] = Counter()
        self.of_role = CollectorRegistry()
        registry.register(self)

    def begin(self, role: str) -> CollectorRegistry:
        """Notes that the process tries to serve as `role`, and returns the registry for the metrics of that."""
        self._role = role
        self.of_role = CollectorRegistry()
        return self.of_role

    def end(self) -> None:
        """Lets go of the metrics of the role that has ended, which hold on to its engine."""
        self.of_role = CollectorRegistry()

    def on_change(self, outcome: str) -> None:
        """Counts the end of a change, `outcome` is one of OUTCOMES."""
        self._num_changes[outcome] += 1

    def describe(self) -> Sequence[Metric]:
        return ()  # else the registry would collect now, to learn names that change with the role

    def collect(self) -> Iterator[Metric]:
        role = GaugeMetricFamily("baton_role", "1 for the role that the process has.", labels=["role"])
        for each in ROLES:
            role.add_metric([each], float(each == self._role))
        yield role
        changes = CounterMetricFamily("baton_role_changes", "Changes of the role, by outcome.", labels=["outcome"])
        for outcome in OUTCOMES:
            changes.add_metric([outcome], self._num_changes[outcome])
        yield changes
        of_role = tuple(self.of_role.collect())
        if not any(each.name == READY for each in of_role):
            yield GaugeMetricFamily(READY, "1 while health says that it serves.", value=0.0)
        yield from of_role
