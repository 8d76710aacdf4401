"""One request's OpenTelemetry spans: Generate, and a child for each phase. The phases fill Generate without gaps.

Generate ├ tokenize ┼ queue ┼ prefill ┼ transfer ┼ bootstrap ┼ first_decode ┼ decode ┼ delivery ┤
                                                             ├ first_token ┤

`first_token` runs from the engine posting the first token until the client's stream has taken output. `grammar` lies in
`tokenize`, while the request waits for its grammar.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from common.errors import BatonError
from common.telemetry.tracing import NO_TRACER, UnixClock, context_of, headers_of, trace_id_of
from decode_service.messages import Phase, PhaseBegan

AttributeValue = str | int | float | bool | tuple[str, ...] | tuple[int, ...]
Attributes = Mapping[str, AttributeValue]


class RequestTrace:
    """Writes one request's spans. If tracing is off or does not sample the request, it only keeps the trace context.

    On exit it ends open spans and marks them with the error, if any. For the event loop only.
    """

    def __init__(
        self,
        span: Span = INVALID_SPAN,
        *,
        tracer: Tracer = NO_TRACER,
        unix_clock: UnixClock | None = None,
        clock: Callable[[], float] = time.monotonic,
        start_s: float = 0.0,
    ) -> None:
        self._span = span
        self._tracer = tracer
        self._unix_clock = unix_clock or UnixClock(0)
        self._clock = clock
        self.is_recording = span.is_recording()
        self.trace_id = trace_id_of(span)
        self.traceparent = headers_of(span).get("traceparent", "")
        self._error: Status | None = None
        self._phase_start_s = start_s
        self._phase: Span | None = self._child("tokenize", start_s) if self.is_recording else None
        self._is_in_bootstrap = False
        self._first_token_s: float | None = None  # when the engine posted it
        self._has_written = False

    def describe(self, attributes: Callable[[], Attributes]) -> None:
        """Adds attributes to the request's span. It does not call `attributes` if the span does not record."""
        if self.is_recording:
            self._span.set_attributes(dict(attributes()))

    def submitted(self) -> None:
        """Ends the tokenize phase and begins the queue phase. Call it when the engine gets the request."""
        if self.is_recording:
            self._begin(Phase.QUEUE, self._clock())

    def on_phase(self, began: PhaseBegan) -> None:
        if not self.is_recording or self._phase is None:
            return
        if began.lost:
            self._phase.set_status(Status(StatusCode.ERROR, began.lost))
        if began.was_retracted:
            self._span.add_event("retracted", timestamp=self._unix_clock.unix_ns(began.at_s))
        if self._is_in_bootstrap and self._first_token_s is None and not began.was_retracted:
            self._first_token_s = began.at_s
        self._is_in_bootstrap = began.phase is Phase.BOOTSTRAP
        self._begin(began.phase, began.at_s)
        if began.phase is Phase.PREFILL:
            self._phase.set_attributes({"baton.replica": began.replica, "baton.attempt": began.attempt})
        if began.phase in (Phase.PREFILL, Phase.LOCAL_PREFILL):
            self._phase.set_attribute("baton.num_held_tokens", began.num_held_tokens)

    @contextmanager
    def grammar(self, kind: str) -> Iterator[None]:
        """Writes the `grammar` span around the wait for a grammar of this kind."""
        start_s = self._clock()
        try:
            yield
        finally:
            if self.is_recording:
                span = self._child("grammar", start_s)
                span.set_attribute("baton.grammar.kind", kind)
                span.end(self._unix_clock.unix_ns(self._clock()))

    def output_written(self) -> None:
        """Writes the `first_token` span at the first call. Call it when the client's stream has taken some output."""
        if self._first_token_s is not None and not self._has_written:
            span = self._child("first_token", self._first_token_s)
            span.end(self._unix_clock.unix_ns(self._clock()))
            self._has_written = True

    def failed(self, error: BatonError) -> None:
        if self.is_recording:
            self._error = Status(StatusCode.ERROR, str(error))
            self._span.set_attribute("error.type", error.reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_recording:
            return
        end_ns = self._unix_clock.unix_ns(max(self._clock(), self._phase_start_s))
        for span in (self._phase, self._span):
            if span is not None:
                if self._error is not None:
                    span.set_status(self._error)
                span.end(end_ns)
        self._phase = None

    def _begin(self, phase: Phase, at_s: float) -> None:
        """Begins a phase's span at `at_s` and ends that of the phase before.

        If the phase before began later than `at_s`, the new span begins at that time instead: edge and engine share a
        clock, but their reports may come out of order.
        """
        self._phase_start_s = at_s = max(at_s, self._phase_start_s)
        if self._phase is not None:
            self._phase.end(self._unix_clock.unix_ns(at_s))
        self._phase = self._child(phase.value, at_s)

    def _child(self, name: str, start_s: float) -> Span:
        return self._tracer.start_span(
            name, set_span_in_context(self._span), start_time=self._unix_clock.unix_ns(start_s)
        )


UNTRACED = RequestTrace()


class RequestTraces:
    """Begins a trace for each Generate call: a child of the span in its metadata, or the root of a new trace."""

    def __init__(self, tracer: Tracer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._clock = clock

    def begin(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> RequestTrace:
        context = context_of(metadata or ())
        unix_clock, start_s = UnixClock.now(), self._clock()
        span = self._tracer.start_span(
            "Generate",
            context,
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": "baton.v1.Inference", "rpc.method": "Generate"},
            start_time=unix_clock.unix_ns(start_s),
        )
        return RequestTrace(span, tracer=self._tracer, unix_clock=unix_clock, clock=self._clock, start_s=start_s)
