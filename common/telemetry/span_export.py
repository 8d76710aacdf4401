"""Exports spans to a collector: sampled and batched. They are dropped if the collector does not accept them.

span ends ──▶ bounded queue ──▶ thread ──OTLP over gRPC──▶ collector
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer

EXPORT_TIMEOUT_S = 5
"""The time limit for exporting one batch, including all retries."""
FLUSH_TIMEOUT_S = 2.0
_MAX_QUEUED_SPANS = 4096
_MAX_BATCH_SPANS = 512
_EXPORT_INTERVAL_MS = 1000

_log = structlog.get_logger(__name__)


class SpanExport:
    """Creates a tracer and exports its spans to `endpoint`, http://HOST:PORT, or https:// for TLS.

    A trace that began in another process follows that process's sampling decision; `sample_ratio` samples the others.
    Ending a span never waits for the collector.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        sample_ratio: float,
        service: str,
        instance_id: str,
        flush_timeout_s: float = FLUSH_TIMEOUT_S,
    ) -> None:
        # OpenTelemetry logs every retry of a batch; LoggedExporter logs a failure once.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # noqa: TID251 - it is not ours
        self._flush_timeout_s = flush_timeout_s
        self._exporter = LoggedExporter(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S), endpoint)
        self._provider = TracerProvider(
            sampler=ParentBased(root=TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(
                {"service.namespace": "baton", "service.name": service, "service.instance.id": instance_id}
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=_MAX_QUEUED_SPANS,
                max_export_batch_size=_MAX_BATCH_SPANS,
                schedule_delay_millis=_EXPORT_INTERVAL_MS,
            )
        )
        self.tracer: Tracer = self._provider.get_tracer("baton")

    def close(self) -> None:
        """Exports the queued spans for at most `flush_timeout_s`, and drops the rest."""
        closing = threading.Thread(target=self._provider.shutdown, name="span-flush", daemon=True)
        closing.start()
        closing.join(self._flush_timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # this ends the export in progress
            closing.join(self._flush_timeout_s)


class LoggedExporter(SpanExporter):
    """An exporter that logs when a collector stops accepting spans, and when it accepts them again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False
        self._is_shut_down = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            _log.warning("spans_dropped", endpoint=self._endpoint, num_spans=len(spans))
        elif self._is_failing and not is_failing:
            _log.info("spans_taken_again", endpoint=self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down.is_set():
            self._is_shut_down.set()
            self._exporter.shutdown()
