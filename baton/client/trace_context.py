"""Passes the caller's OpenTelemetry trace context on as call metadata."""

from __future__ import annotations

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = tuple[tuple[str, str], ...]

_W3C = TraceContextTextMapPropagator()


def trace_metadata() -> Metadata:
    """Returns the current span's `traceparent`, and its `tracestate` if it has one. Without a span it is empty."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())
