"""What is recorded of the rows of Handoff calls: metrics, and OpenTelemetry spans.

A row's span is a child of the span that its request brought along.

prefill_row ├ queue ┼ chunk ┼ chunk ┼ chunk ┤
                            ├ send ────────────────┤     from the row's first segment until the stream has its last byte
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from prometheus_client import CollectorRegistry, Counter, Histogram

from common.errors import RowFailure
from common.telemetry.metrics import PHASE_S
from common.telemetry.tracing import UnixClock, context_of, span_context_of
from common.wire.handoff import Frame, HandoffRow, KvSegment, PrebuiltBatch, RowFailed
from prefill_service.messages import ChunkComputed, RowStarted, TracedEvent


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


class RowTraces:
    """Writes the spans of those rows of a Handoff call whose trace is sampled. For the event loop only.

    Rows are named by their number in the call. Spans belong to the traces that the requests brought along; no new trace
    begins here. A row's span ends when the row fails or is cancelled, or when gRPC has taken its last byte. `close`
    ends the others with an error.
    """

    def __init__(self, tracer: Tracer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._clock = clock
        self._unix_clock = UnixClock.now()
        self._rows: dict[int, _RowTrace] = {}

    def begin(self, rows: Iterable[tuple[int, HandoffRow]]) -> frozenset[int]:
        """Begins a span for each traced row. Returns the numbers of these rows."""
        for number, row in rows:
            if row.traceparent and (trace := self._begin(row)) is not None:
                self._rows[number] = trace
        return frozenset(self._rows)

    def on_event(self, number: int, event: TracedEvent) -> None:
        if (trace := self._rows.get(number)) is not None:
            trace.on_event(event)

    def on_frame(self, frame: Frame, taken_from_s: float) -> None:
        """Records that gRPC has taken the frame. `taken_from_s` is when gRPC was given it, by `clock`."""
        if not self._rows:
            return
        match frame:
            case KvSegment(row=number):
                if (trace := self._rows.get(number)) is not None:
                    trace.sent(frame.num_bytes, taken_from_s, self._clock())
                    self._end_if_sent(number)
            case PrebuiltBatch():
                for place, number in enumerate(frame.rows.tolist()):
                    if (trace := self._rows.get(number)) is not None:
                        trace.computed(
                            num_bytes=sum(int(sizes[place]) for sizes in frame.bytes_sent.values()),
                            num_cached_tokens=int(frame.num_cached_tokens[place]),
                        )
                        self._end_if_sent(number)
            case RowFailed(row=number, message=message):
                self._fail((number,), message, frame.reason.name)

    def on_cancelled(self, numbers: Iterable[int]) -> None:
        self._fail(numbers, "cancelled by the decode service", "CANCELLED")

    def close(self) -> None:
        self._fail(tuple(self._rows), "the call ended before the row did", "CALL_ENDED")

    def now_s(self) -> float:
        return self._clock()

    def _begin(self, row: HandoffRow) -> _RowTrace | None:
        parent = context_of([("traceparent", row.traceparent)])
        if not span_context_of(parent).trace_flags.sampled:
            return None
        start_s = self._clock()
        span = self._tracer.start_span(
            "prefill_row", parent, kind=SpanKind.SERVER, start_time=self._unix_clock.unix_ns(start_s)
        )
        if not span.is_recording():
            return None
        span.set_attributes(
            {
                "baton.request_id": row.request_id,
                "baton.attempt": row.attempt,
                "baton.num_held_tokens": row.num_held,
                "gen_ai.usage.input_tokens": len(row.token_ids),
            }
        )
        return _RowTrace(span, self._tracer, self._unix_clock, start_s)

    def _end_if_sent(self, number: int) -> None:
        if self._rows[number].is_sent:
            self._rows.pop(number).end(self._clock())

    def _fail(self, numbers: Iterable[int], message: str, reason: str) -> None:
        for number in numbers:
            if (trace := self._rows.pop(number, None)) is not None:
                trace.end(self._clock(), Status(StatusCode.ERROR, message), reason)


class _RowTrace:
    def __init__(self, span: Span, tracer: Tracer, unix_clock: UnixClock, start_s: float) -> None:
        self._span = span
        self._tracer = tracer
        self._unix_clock = unix_clock
        self._start_s = start_s
        self._has_started = False
        self._sending_s: tuple[float, float] | None = None
        self._num_bytes = 0
        self._num_expected_bytes: int | None = None

    @property
    def is_sent(self) -> bool:
        return self._num_bytes == self._num_expected_bytes

    def on_event(self, event: TracedEvent) -> None:
        match event:
            case RowStarted():
                self._has_started = True
                self._child("queue", self._start_s, event.at_s, {})
            case ChunkComputed():
                tokens = {"baton.token_start": event.token_start, "baton.token_stop": event.token_stop}
                batch = {"baton.batch.num_rows": event.num_batch_rows, "baton.batch.num_tokens": event.num_batch_tokens}
                self._child("chunk", event.start_s, event.end_s, tokens | batch)

    def sent(self, num_bytes: int, start_s: float, end_s: float) -> None:
        self._num_bytes += num_bytes
        self._sending_s = (self._sending_s[0] if self._sending_s else start_s, end_s)

    def computed(self, *, num_bytes: int, num_cached_tokens: int) -> None:
        """Records that the row's first token was computed.

        `num_bytes` is the size of the KV to be sent for the row, and `num_cached_tokens` the number of tokens whose KV
        was cached.
        """
        self._num_expected_bytes = num_bytes
        self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", num_cached_tokens)

    def end(self, now_s: float, status: Status | None = None, error_type: str = "") -> None:
        if not self._has_started:
            self._child("queue", self._start_s, now_s, {})
        if self._sending_s is not None:
            self._child("send", *self._sending_s, {"baton.kv_bytes": self._num_bytes})
        if status is not None:
            self._span.set_status(status)
            self._span.set_attribute("error.type", error_type)
        self._span.end(self._unix_clock.unix_ns(now_s))

    def _child(self, name: str, start_s: float, end_s: float, attributes: dict[str, int]) -> None:
        """Writes a child span of the row's span. It begins and ends no earlier than the row's span begins.

        Edge and engine share a clock, but the engine may report a time from before the edge began the row's span.
        """
        span = self._tracer.start_span(
            name,
            set_span_in_context(self._span),
            attributes=attributes,
            start_time=self._unix_clock.unix_ns(max(start_s, self._start_s)),
        )
        span.end(self._unix_clock.unix_ns(max(end_s, self._start_s)))
