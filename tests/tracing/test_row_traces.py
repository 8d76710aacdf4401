"""Tests of a row's spans, made from events of the prefill engine and of the call's stream at times of the test's
clock.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from opentelemetry.trace import StatusCode

from common.errors import RowFailure
from common.telemetry.tracing import NO_TRACER
from common.wire.handoff import HandoffRow, KvSegment, PrebuiltBatch, RowFailed
from prefill_service.edge.observer import RowTraces
from prefill_service.messages import ChunkComputed, RowStarted
from tests.handoff.samples import row
from tests.tracing.spans import Clock, EndedSpans, parent_ids, seconds

PARENT = f"00-{'ab' * 16}-{'cd' * 8}"


@pytest.fixture
def spans() -> EndedSpans:
    return EndedSpans()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def traced() -> HandoffRow:
    return replace(row(), traceparent=f"{PARENT}-01", attempt=2, num_held_tokens=(("draft", 1), ("target", 1)))


def segment_of(number: int, num_bytes: int) -> KvSegment:
    return KvSegment(number, "target", 0, 1, 0, 1, bytes(num_bytes))


def prebuilt_of(*numbers: int, num_bytes: int, num_cached_tokens: int = 0) -> PrebuiltBatch:
    each = np.zeros(len(numbers), dtype=np.int64)
    return PrebuiltBatch(
        rows=np.array(numbers, dtype=np.int64),
        seq_lens=each,
        first_token_ids=each,
        bytes_sent={"target": each + num_bytes},
        queue_s=each.astype(np.float64),
        compute_s=each.astype(np.float64),
        num_cached_tokens=each + num_cached_tokens,
        first_token_logprobs=(None,) * len(numbers),
        seed_columns={},
    )


def chunk(number: int, start: int, stop: int, start_s: float, end_s: float) -> ChunkComputed:
    return ChunkComputed("call", number, start, stop, 3, 48, start_s, end_s)


def test_a_row_waits_computes_its_chunks_and_ends_with_its_last_byte(spans: EndedSpans, clock: Clock) -> None:
    traces = RowTraces(spans.tracer, clock=clock)
    assert traces.begin([(0, row()), (1, traced())]) == {1}
    traces.on_event(1, RowStarted("call", 1, 1002.0))
    traces.on_event(1, chunk(1, 0, 16, 1002.0, 1005.0))
    clock.now_s = 1006.0
    traces.on_frame(segment_of(1, 600), 1005.5)
    traces.on_event(1, chunk(1, 16, 20, 1005.0, 1007.0))
    traces.on_frame(prebuilt_of(0, 1, num_bytes=1000, num_cached_tokens=2), 1007.0)
    assert "prefill_row" not in spans.names()
    clock.now_s = 1009.0
    traces.on_frame(segment_of(1, 400), 1008.0)
    traces.close()

    assert [(span.name, seconds(span)) for span in spans.all] == [
        ("queue", pytest.approx(2.0)),
        ("chunk", pytest.approx(3.0)),
        ("chunk", pytest.approx(2.0)),
        ("send", pytest.approx(3.5)),
        ("prefill_row", pytest.approx(9.0)),
    ]
    whole = spans.named("prefill_row")
    assert whole.parent is not None and f"{whole.parent.span_id:016x}" == "cd" * 8
    assert whole.attributes is not None and whole.attributes["baton.attempt"] == 2
    assert whole.attributes["baton.num_held_tokens"] == 1
    assert whole.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert whole.status.status_code is StatusCode.UNSET
    assert spans.all[2].attributes == {
        "baton.token_start": 16,
        "baton.token_stop": 20,
        "baton.batch.num_rows": 3,
        "baton.batch.num_tokens": 48,
    }
    assert spans.named("send").attributes == {"baton.kv_bytes": 1000}
    assert parent_ids(spans.all[:-1]) == {whole.context.span_id}


def test_a_row_whose_first_token_leaves_last_ends_with_it(spans: EndedSpans, clock: Clock) -> None:
    traces = RowTraces(spans.tracer, clock=clock)
    traces.begin([(0, traced())])
    traces.on_frame(segment_of(0, 10), 1000.0)
    assert not spans.all
    traces.on_frame(prebuilt_of(0, num_bytes=10), 1000.0)

    assert spans.names()[-1] == "prefill_row"


def test_rows_that_fail_or_break_off_say_why(spans: EndedSpans, clock: Clock) -> None:
    traces = RowTraces(spans.tracer, clock=clock)
    traces.begin([(number, traced()) for number in range(3)])
    traces.on_frame(RowFailed(0, RowFailure.COMPUTE, True, 5, "a step failed"), 1000.0)
    traces.on_cancelled((1,))
    traces.on_frame(RowFailed(1, RowFailure.CANCELLED, False, 0, "cancelled"), 1000.0)
    traces.close()

    rows = [span for span in spans.all if span.name == "prefill_row"]
    assert [span.attributes["error.type"] for span in rows if span.attributes] == ["COMPUTE", "CANCELLED", "CALL_ENDED"]
    assert {span.status.status_code for span in rows} == {StatusCode.ERROR}
    assert rows[0].status.description == "a step failed"
    assert spans.names().count("queue") == 3, "they were queued to their end"


@pytest.mark.parametrize("traceparent", ["", f"{PARENT}-00", "not-one", "x" * 500])
def test_a_row_begins_no_trace_of_its_own(spans: EndedSpans, traceparent: str) -> None:
    traces = RowTraces(spans.tracer)

    assert traces.begin([(0, replace(row(), traceparent=traceparent))]) == frozenset()
    traces.on_event(0, RowStarted("call", 0, 1.0))
    traces.close()
    assert not spans.all


def test_a_service_that_does_not_trace_asks_its_engine_for_nothing() -> None:
    assert RowTraces(NO_TRACER).begin([(0, traced())]) == frozenset()
