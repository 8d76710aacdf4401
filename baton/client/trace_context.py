"""The caller's trace context as call metadata."""

from __future__ import annotations

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = tuple[tuple[str, str], ...]

_W3C = TraceContextTextMapPropagator()


def trace_metadata() -> Metadata:
    """`traceparent`, and `tracestate` if there is one, of the caller's current span; nothing without a span."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())
