"""The prefill service's row and byte counts as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from common.errors import RowFailure
from common.telemetry.metrics import PHASE_S
from common.wire.handoff import Frame, KvSegment, PrebuiltBatch, RowFailed


class HandoffMetrics:
    """Updates the metrics from the frames that an engine emits.

    The label `outcome` is "prebuilt", or a row failure's reason in lower case. Every outcome is exposed from the start
    with the value 0, because Prometheus does not count a series' first value as an increase.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows = Counter(
            "baton_requests",
            "Rows by outcome; one whose KV cannot be sent is also prebuilt.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("prebuilt", *(reason.value.lower() for reason in RowFailure)):
            self._rows.labels(outcome)
        self._queue_s = Histogram(
            "baton_queue_seconds", "From a row's arrival to its first chunk.", buckets=PHASE_S, registry=registry
        )
        self._compute_s = Histogram(
            "baton_prefill_seconds", "First chunk to first token.", buckets=PHASE_S, registry=registry
        )
        self._lent_bytes = Counter(
            "baton_handoff_lent_bytes", "Of these, those that the receiver reads in the pool.", registry=registry
        )
        self._bytes = Counter("baton_handoff_bytes", "KV bytes handed to the transport.", registry=registry)

    def on_frames(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            match frame:
                case KvSegment():
                    self._bytes.inc(frame.num_bytes)
                    if frame.shared is not None:
                        self._lent_bytes.inc(frame.num_bytes)
                case PrebuiltBatch():
                    self._rows.labels("prebuilt").inc(len(frame.rows))
                    for queue_s, compute_s in zip(frame.queue_s.tolist(), frame.compute_s.tolist(), strict=True):
                        self._queue_s.observe(queue_s)
                        self._compute_s.observe(compute_s)
                case RowFailed():
                    self._rows.labels(frame.reason.value.lower()).inc()
                case _:
                    pass
