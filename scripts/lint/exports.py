"""The samples that each service exports, for rules about what asks for them."""

from __future__ import annotations

from functools import cache

import numpy as np
from prometheus_client import CollectorRegistry

from common.grammar.grammar import GrammarKind
from common.telemetry.metrics import EngineMetrics, GrammarMetrics, MaskMetrics, RequestMetrics, SpeculationMetrics
from common.telemetry.stats import EngineLoad, MaskStats, PoolCounts, SpeculationStats, StepStats
from common.wire.handoff import PrebuiltBatch
from decode_service.messages import FinishReason
from gateway.request_record import GatewayMetrics
from prefill_service.edge.observer import HandoffMetrics

LOAD = EngineLoad(PoolCounts(total=1, free=1), PoolCounts(total=1, free=1), num_queued=0, num_running=0, num_steps=0)
SPECULATION = SpeculationStats(num_levels=1, accept_lens=(1,), draft_s=0.1, verify_s=0.1, extend_s=0.1)
STEP = StepStats(1, 1, 0.1, SPECULATION, MaskStats(num_rows=1, mask_s=0.1, wait_s=0.1))

Exports = dict[str, dict[str, set[str]]]
"""For each Prometheus job, the names of its samples, each with its labels."""


@cache
def exported() -> Exports:
    """Returns the samples that each service exports after every kind of event has happened once."""
    prefill, decode, gateway = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    for registry in (prefill, decode):
        engine = EngineMetrics(registry)
        engine.watch(lambda: LOAD, is_ready=lambda: True)
        engine.on_step(STEP)
        GrammarMetrics(registry)
    rows = np.array([0], np.int64)
    batch = PrebuiltBatch(rows, rows, rows, {"target": rows}, np.array([0.1]), np.array([0.1]), 0 * rows, (None,))
    HandoffMetrics(prefill).on_frames([batch])
    SpeculationMetrics(decode).on_step(STEP)
    MaskMetrics(decode).on_step(STEP)
    requests = RequestMetrics(decode, finish_reasons=FinishReason, grammar_kinds=GrammarKind)
    requests.requests.labels("eos").inc()
    requests.drafted_at.labels(1).inc()
    requests.accepted_at.labels(1).inc()
    http = GatewayMetrics(gateway)
    http.on_end(route="/v1/completions", status=200, seconds=0.1)
    http.on_first_token(route="/v1/completions", seconds=0.1)
    return {
        job: {sample.name: set(sample.labels) for metric in registry.collect() for sample in metric.samples}
        for job, registry in (("prefill", prefill), ("decode", decode), ("gateway", gateway))
    }
