"""Opens a process's tracer, which exports spans by OTLP or does nothing, and carries W3C trace context in headers.
docs/tracing.md explains the spans.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanContext, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.config.settings import ProcessSettings

_W3C = TraceContextTextMapPropagator()
_NAMES = ("traceparent", "tracestate")


def context_of(headers: Iterable[tuple[str, str | bytes]]) -> Context:
    """Returns the trace context in the headers `traceparent` and `tracestate`, or an empty one."""
    carrier = {name: value for name, value in headers if name in _NAMES and isinstance(value, str)}
    return _W3C.extract(carrier, context=Context()) if carrier else Context()


def span_context_of(context: Context) -> SpanContext:
    return get_current_span(context).get_span_context()


def headers_of(span: Span) -> Mapping[str, str]:
    """Returns headers that make `span` the parent of the receiver's spans; none if the span has no trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier


def trace_id_of(span: Span) -> str:
    """Returns the span's trace id in hexadecimal, or "" if it has no trace."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


@dataclass(frozen=True, slots=True)
class UnixClock:
    """Converts monotonic seconds, the engines' clock, to Unix nanoseconds by a constant offset.

    So the spans of a trace keep their distances even if the wall clock is changed.
    """

    offset_ns: int

    @classmethod
    def now(cls) -> Self:
        return cls(time.time_ns() - time.monotonic_ns())

    def unix_ns(self, monotonic_s: float) -> int:
        return self.offset_ns + round(monotonic_s * 1e9)


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
