"""Prometheus metrics of the services: their engines, grammars, drafts, requests and roles."""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, core
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import request_reasons
from common.telemetry.stats import EngineLoad, ForwardCounts, PoolCounts, StepStats

PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_BATCH_SIZE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
POOL_STATES = ("free", "reserved", "transferring", "running", "quarantined", "cached")
PHASES = ("queue", "prefill", "transfer", "first_decode")
_ROLES = ("prefill", "decode")
ROLE_OUTCOMES = ("changed", "failed")
_READY = "baton_ready"


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


class EngineMetrics:
    """The engine's metrics. Steps are observed as they happen, on the engine's thread; its load (rows, slots, queue)
    is read at each scrape.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._batch_size = OneWriterHistogram("baton_batch_size", "Rows in a forward.", buckets=_BATCH_SIZE)
        self._step_tokens = OneWriterHistogram("baton_step_tokens", "Tokens computed by a forward.", buckets=NUM_TOKENS)
        self._step_s = OneWriterHistogram(
            "baton_step_seconds", "From a forward's launch to its result.", buckets=_TOKEN_S
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

        `grpc_port` is the port at which callers reach the service; 0 before it listens. `is_fused` says whether one
        compiled kernel computes whole forwards. `forward_counts` maps each model's name, of the target and the draft
        head, to how many forwards that kernel has computed and has declined.
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


class GrammarMetrics:
    """The metrics of a service's compiled grammars."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._found = Counter("baton_cached_grammars", "Grammars that were compiled before.", registry=registry)
        self._compile_s = Histogram(
            "baton_grammar_compile_seconds", "Compiling a grammar.", buckets=PHASE_S, registry=registry
        )

    def on_found(self) -> None:
        self._found.inc()

    def on_compiled(self, seconds: float) -> None:
        self._compile_s.observe(seconds)


class MaskMetrics:
    """The metrics of steps in which grammars constrain draws. Other steps are not observed. For the engine's thread
    only.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._num_rows = OneWriterHistogram("baton_masked_rows", "Rows of a step with a grammar.", buckets=_BATCH_SIZE)
        self._mask_s = OneWriterHistogram("baton_mask_seconds", "Computing a step's masks.", buckets=_TOKEN_S)
        self._wait_s = OneWriterHistogram(
            "baton_mask_wait_seconds", "From a forward's end to its draw, which waits for masks.", buckets=_TOKEN_S
        )
        for histogram in (self._num_rows, self._mask_s, self._wait_s):
            registry.register(histogram)

    def on_step(self, stats: StepStats) -> None:
        if (masks := stats.masks) is None:
            return
        self._num_rows.observe(masks.num_rows)
        self._mask_s.observe(masks.mask_s)
        self._wait_s.observe(masks.wait_s)


class SpeculationMetrics:
    """The cost and the gain of drafting, observed at each step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._levels = OneWriterHistogram("baton_draft_levels", "Tokens ahead that a step drafted.", buckets=range(17))
        self._accept_lengths = OneWriterHistogram(
            "baton_accept_length", "Tokens that a step committed of a row.", buckets=range(1, 17)
        )
        self._parts = {
            part: OneWriterHistogram(f"baton_{part}_seconds", f"{part} of a step.", buckets=_TOKEN_S)
            for part in ("draft", "verify", "extend")
        }
        for histogram in (self._levels, self._accept_lengths, *self._parts.values()):
            registry.register(histogram)

    def on_step(self, stats: StepStats) -> None:
        if (speculation := stats.speculation) is None:
            return
        self._levels.observe(speculation.num_levels)
        if speculation.num_levels:  # one `observe` per row would cost more than the rest of the step
            for length, num_rows in collections.Counter(speculation.accept_lens).items():
                self._accept_lengths.observe(length, num_rows)
        for part, histogram in self._parts.items():
            histogram.observe(getattr(speculation, f"{part}_s"))


class RequestMetrics:
    """The metrics of requests. The counter `requests` has the label `outcome`: a finish reason ("eos", "length", ...),
    or an ErrorInfo reason in lower case.

    Every outcome is exposed with 0 from the start. Otherwise Prometheus would not count the requests that precede the
    first scrape of an outcome as an increase.
    """

    def __init__(
        self, registry: CollectorRegistry, *, finish_reasons: Iterable[Enum], grammar_kinds: Iterable[Enum]
    ) -> None:
        self.requests = Counter("baton_requests", "Requests ended, by outcome.", ["outcome"], registry=registry)
        for outcome in (
            *(reason.value for reason in finish_reasons),
            *(reason.lower() for reason in request_reasons()),
        ):
            self.requests.labels(outcome)
        self.constrained = Counter(
            "baton_constrained_requests", "Requests with a grammar, by its kind.", ["kind"], registry=registry
        )
        for kind in grammar_kinds:
            self.constrained.labels(kind.value)
        self.phases = {
            phase: Histogram(f"baton_{phase}_seconds", f"Phase: {phase}.", buckets=PHASE_S, registry=registry)
            for phase in PHASES
        }
        self.inter_token_s = OneWriterHistogram(
            "baton_inter_token_seconds", "Between output tokens of a request.", buckets=_TOKEN_S
        )
        registry.register(self.inter_token_s)
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens of finished requests.", registry=registry)
        self.output_tokens = Counter("baton_output_tokens", "Output tokens delivered.", registry=registry)
        self.verify_steps = Counter(
            "baton_verify_steps", "Verify steps of finished requests, each request's counted.", registry=registry
        )
        self.drafted_tokens = Counter("baton_drafted_tokens", "Drafts verified, finished requests.", registry=registry)
        self.accepted_tokens = Counter(
            "baton_accepted_tokens", "Drafts accepted, finished requests.", registry=registry
        )
        self.forced_tokens = Counter(
            "baton_forced_tokens", "Accepted drafts that a grammar forced, finished requests.", registry=registry
        )
        self.drafted_at = Counter(
            "baton_drafted_at",
            "Verify steps without forced drafts, with a draft so far ahead.",
            ["position"],
            registry=registry,
        )
        self.accepted_at = Counter(
            "baton_accepted_at",
            "Verify steps without forced drafts that accepted a draft so far ahead.",
            ["position"],
            registry=registry,
        )
        self.handoff_bytes = Counter("baton_handoff_bytes", "KV bytes received.", registry=registry)


class RoleMetrics(Collector):
    """Exposes the role, and the metrics in `of_role`, a registry that is new whenever a role begins.

    The metrics of a role begin at 0 whenever the role does, as after a restart; only counts of forwards go on, because
    the models stay. While no role serves, "not ready" is exposed.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._role = ""
        self._num_changes: collections.Counter[str] = collections.Counter()
        self.of_role = CollectorRegistry()
        registry.register(self)

    def begin(self, role: str) -> CollectorRegistry:
        """Notes that the process tries to serve as `role`, and returns the registry for that role's metrics."""
        self._role = role
        self.of_role = CollectorRegistry()
        return self.of_role

    def end(self) -> None:
        """Lets go of the metrics of the role that has ended, which hold on to its engine."""
        self.of_role = CollectorRegistry()

    def on_change(self, outcome: str) -> None:
        """Counts the end of a change, which is one of ROLE_OUTCOMES."""
        self._num_changes[outcome] += 1

    def describe(self) -> Sequence[Metric]:
        return ()  # else the registry would collect now, to learn names that change with the role

    def collect(self) -> Iterator[Metric]:
        role = GaugeMetricFamily("baton_role", "1 for the role that the process has.", labels=["role"])
        for each in _ROLES:
            role.add_metric([each], float(each == self._role))
        yield role
        changes = CounterMetricFamily("baton_role_changes", "Changes of the role, by outcome.", labels=["outcome"])
        for outcome in ROLE_OUTCOMES:
            changes.add_metric([outcome], self._num_changes[outcome])
        yield changes
        of_role = tuple(self.of_role.collect())
        if not any(each.name == _READY for each in of_role):
            yield GaugeMetricFamily(_READY, "1 while health says that it serves.", value=0.0)
        yield from of_role
