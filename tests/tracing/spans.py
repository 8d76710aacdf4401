"""Collects ended spans in this process, without a collector."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class EndedSpans:
    """A tracer, and the spans of it that have ended. It samples all root spans, and the children of sampled parents."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("tests")

    @property
    def all(self) -> Sequence[ReadableSpan]:
        """All ended spans, in the order of their ends."""
        return self._exporter.get_finished_spans()

    def names(self) -> list[str]:
        return [span.name for span in self.all]

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all if span.name == name]
        return span


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def parent_ids(spans: Sequence[ReadableSpan]) -> set[int]:
    return {span.parent.span_id for span in spans if span.parent is not None}


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
