"""A process's tracer: one that exports by OTLP, or one that does nothing. docs/tracing.md says what spans mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import NoOpTracer, Tracer

from common.config.process_settings import ProcessSettings

NO_TRACER: Tracer = NoOpTracer()
"""Its spans record nothing, and hand on the context of their parents."""


@contextmanager
def process_tracer(settings: ProcessSettings, *, service: str, instance_id: str) -> Iterator[Tracer]:
    """What is left is exported at the end, within seconds. Without `otlp_endpoint` nothing is: no SDK is imported."""
    if not settings.otlp_endpoint:
        yield NO_TRACER
        return
    from common.telemetry.span_export import SpanExport

    export = SpanExport(
        endpoint=settings.otlp_endpoint,
        sample_ratio=settings.trace_sample_ratio,
        service=service,
        instance_id=instance_id,
    )
    try:
        yield export.tracer
    finally:
        export.close()
