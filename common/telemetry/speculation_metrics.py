"""Speculation as Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from common.telemetry.buckets import TOKEN_S
from common.telemetry.step_stats import StepStats


class SpeculationMetrics:
    """What drafting costs and brings, step by step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._levels = Histogram(
            "baton_draft_levels", "Tokens ahead that a step drafted.", buckets=range(17), registry=registry
        )
        self._accept_length = Histogram(
            "baton_accept_length", "Tokens that a step committed of a row.", buckets=range(1, 17), registry=registry
        )
        self._parts = {
            part: Histogram(f"baton_{part}_seconds", f"{part} of a step.", buckets=TOKEN_S, registry=registry)
            for part in ("draft", "verify", "extend")
        }

    def on_step(self, stats: StepStats) -> None:
        if (speculation := stats.speculation) is None:
            return
        self._levels.observe(speculation.num_levels)
        for accept_len in speculation.accept_lens if speculation.num_levels else ():
            self._accept_length.observe(accept_len)
        for part, histogram in self._parts.items():
            histogram.observe(getattr(speculation, f"{part}_s"))
