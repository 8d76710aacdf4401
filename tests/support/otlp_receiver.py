"""An OTLP collector for tests: it receives spans over gRPC, as a real one does, and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span as the collector received it. `parent_id` is empty for a root; `error` is None unless the span's status
    is an error.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[str, ...]
    error: str | None

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans. Services send them to `endpoint`. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> Sequence[ReceivedSpan]:
        """The spans received so far, in the order of their starts."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.start_ns, -span.end_ns))

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        received = [
            _received(span, _values(resource.resource.attributes)["service.name"])
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += received
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    with ThreadPoolExecutor(2) as executor:
        server = grpc.server(executor)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
        receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield receiver
        finally:
            server.stop(0).wait()


def children_of(parent: ReceivedSpan, spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.parent_id == parent.span_id]


def _received(span: trace_pb2.Span, service: str) -> ReceivedSpan:
    is_error = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=tuple(event.name for event in span.events),
        error=span.status.message if is_error else None,
    )


def _values(attributes: Sequence[common_pb2.KeyValue]) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
