"""Opens a process's tracer, which exports spans by OTLP or does nothing. docs/tracing.md explains the spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import NoOpTracer, Tracer

from common.config.process_settings import ProcessSettings

NO_TRACER: Tracer = NoOpTracer()
"""A tracer that does nothing. Its spans record nothing and pass on their parent's context."""


@contextmanager
def process_tracer(settings: ProcessSettings, *, service: str, instance_id: str) -> Iterator[Tracer]:
    """Yields the tracer that the settings ask for. At the end it exports the remaining spans, within seconds.

    Without `otlp_endpoint` nothing is exported, and no SDK is imported.
    """
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
