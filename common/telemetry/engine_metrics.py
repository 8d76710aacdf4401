"""Prometheus metrics of readiness, and of the engine's pools and steps, for either service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.load import EngineLoad, PoolCounts
from common.telemetry.histogram import BATCH_SIZE, NUM_TOKENS, TOKEN_S, OneWriterHistogram
from common.telemetry.step_stats import ForwardCounts, StepStats

POOL_STATES = ("free", "reserved", "transferring", "running", "quarantined", "cached")


class EngineMetrics:
    """The engine's metrics. Steps are observed as they happen, on the engine's thread; its load (rows, slots, queue)
    is read at each scrape.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._batch_size = OneWriterHistogram("baton_batch_size", "Rows in a forward.", buckets=BATCH_SIZE)
        self._step_tokens = OneWriterHistogram("baton_step_tokens", "Tokens computed by a forward.", buckets=NUM_TOKENS)
        self._step_s = OneWriterHistogram(
            "baton_step_seconds", "From a forward's launch to its result.", buckets=TOKEN_S
        )
        for histogram in (self._batch_size, self._step_tokens, self._step_s):
            registry.register(histogram)

    def on_step(self, stats: StepStats) -> None:
        self._batch_size.observe(stats.batch_size)
        self._step_tokens.observe(stats.num_tokens)
        self._step_s.observe(stats.step_s)

    def watch(
        self,
        load: Callable[[], EngineLoad],
        *,
        is_ready: Callable[[], bool],
        grpc_port: Callable[[], int] = lambda: 0,
        is_fused: Callable[[], bool] = lambda: False,
        forward_counts: Mapping[str, ForwardCounts] | None = None,
    ) -> None:
        """Exposes the engine's load, readiness and forward counts at each scrape.

        `grpc_port` is the port at which the service is called, by which others know it; 0 before it listens.
        `is_fused` says whether one compiled kernel computes whole forwards. `forward_counts` maps each model's name, of
        the target and the draft head, to how many forwards that kernel has computed and has declined.
        """
        self._registry.register(_LoadCollector(load, is_ready, grpc_port, is_fused, forward_counts or {}))


class _LoadCollector(Collector):
    def __init__(
        self,
        load: Callable[[], EngineLoad],
        is_ready: Callable[[], bool],
        grpc_port: Callable[[], int],
        is_fused: Callable[[], bool],
        forward_counts: Mapping[str, ForwardCounts],
    ) -> None:
        self._load = load
        self._is_ready = is_ready
        self._grpc_port = grpc_port
        self._is_fused = is_fused
        self._forward_counts = forward_counts

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        yield GaugeMetricFamily("baton_ready", "1 while health says that it serves.", value=float(self._is_ready()))
        yield GaugeMetricFamily("baton_grpc_port", "The port of gRPC.", value=self._grpc_port())
        yield GaugeMetricFamily(
            "baton_degraded", "1 while decode computes all prompts itself.", value=float(load.is_degraded)
        )
        yield GaugeMetricFamily("baton_fused", "1 while forwards run by one kernel.", value=float(self._is_fused()))
        yield from self._forwards()
        yield _pool("baton_rows", "Request rows by state.", load.rows)
        yield _pool("baton_kv_slots", "KV token slots by state.", load.slots)
        windows = GaugeMetricFamily("baton_window_slots", "Slots of windows by state.", labels=["group", "state"])
        for group, counts in load.window_slots.items():
            for state in ("free", "reserved", "running"):
                windows.add_metric([group, state], getattr(counts, state))
        yield windows
        yield GaugeMetricFamily("baton_queued_requests", "Requests without a row.", value=load.num_queued)
        yield GaugeMetricFamily("baton_running_requests", "Requests in the running batch.", value=load.num_running)
        yield GaugeMetricFamily("baton_unsent_kv_bytes", "KV not yet written to a receiver.", value=load.unsent_bytes)
        yield CounterMetricFamily("baton_steps", "Engine steps.", value=load.num_steps)
        yield CounterMetricFamily("baton_row_tokens", "Tokens of rows, when reserved.", value=load.prefixes.num_tokens)
        yield CounterMetricFamily("baton_cached_tokens", "Of them: with cached KV.", value=load.prefixes.num_found)
        yield CounterMetricFamily("baton_evicted_tokens", "Cached KV that made room.", value=load.prefixes.num_evicted)
        yield CounterMetricFamily(
            "baton_expected_cached_tokens",
            "Tokens that prefill should have cached, when handed over.",
            value=load.num_expected_cached,
        )
        yield CounterMetricFamily(
            "baton_handoff_held_bytes", "KV not sent for landed rows: decode had it.", value=load.held_bytes
        )
        yield GaugeMetricFamily(
            "baton_uncomputed_tokens", "Tokens of prompts still to compute.", value=load.num_uncomputed_tokens
        )
        yield CounterMetricFamily(
            "baton_row_retries", "Rows that were lost or refused, and are tried again.", value=load.num_row_retries
        )
        yield CounterMetricFamily("baton_retractions", "Requests that gave their KV back.", value=load.num_retractions)

    def _forwards(self) -> Iterator[Metric]:
        fused = CounterMetricFamily("baton_fused_forwards", "Forwards that one kernel computed.", labels=["model"])
        declined = CounterMetricFamily(
            "baton_declined_forwards", "Forwards that the kernel does not take.", labels=["model"]
        )
        for model, counts in self._forward_counts.items():
            fused.add_metric([model], counts.num_fused)
            declined.add_metric([model], counts.num_declined)
        yield fused
        yield declined


def _pool(name: str, documentation: str, counts: PoolCounts) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, documentation, labels=["state"])
    for state in POOL_STATES:
        family.add_metric([state], getattr(counts, state))
    return family
