"""Prometheus metrics of grammars: what compiling them costs, and what their masks cost a step."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from common.telemetry.histogram import BATCH_SIZE, PHASE_S, TOKEN_S, OneWriterHistogram
from common.telemetry.step_stats import StepStats


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
    """The metrics of steps whose draws grammars constrain. Other steps observe none. For the engine's thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._num_rows = OneWriterHistogram("baton_masked_rows", "Rows of a step with a grammar.", buckets=BATCH_SIZE)
        self._mask_s = OneWriterHistogram("baton_mask_seconds", "Computing a step's masks.", buckets=TOKEN_S)
        self._wait_s = OneWriterHistogram(
            "baton_mask_wait_seconds", "From a forward's end to its draw, which waits for masks.", buckets=TOKEN_S
        )
        for histogram in (self._num_rows, self._mask_s, self._wait_s):
            registry.register(histogram)

    def on_step(self, stats: StepStats) -> None:
        if (masks := stats.masks) is None:
            return
        self._num_rows.observe(masks.num_rows)
        self._mask_s.observe(masks.mask_s)
        self._wait_s.observe(masks.wait_s)
