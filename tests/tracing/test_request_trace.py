"""Tests of a request's spans, made from events of the engine at times of the test's clock."""

from __future__ import annotations

import pytest
from opentelemetry.trace import StatusCode

from common.errors import EngineFault, InvalidRequest
from decode_service.edge.request_trace import RequestTrace, RequestTraces
from decode_service.messages import Phase, PhaseBegan
from tests.tracing.spans import Clock, EndedSpans, parent_ids, seconds

SAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spans() -> EndedSpans:
    return EndedSpans()


def reaches(trace: RequestTrace, *stages: tuple[Phase, float]) -> None:
    for stage, at_s in stages:
        trace.on_phase(PhaseBegan("r", stage, at_s))


def test_stages_last_until_the_next_and_fill_the_request(spans: EndedSpans, clock: Clock) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([("traceparent", SAMPLED)]) as trace:
        clock.now_s = 1001.0
        trace.submitted()
        reaches(trace, (Phase.PREFILL, 1003.0), (Phase.TRANSFER, 1006.0), (Phase.BOOTSTRAP, 1010.0))
        reaches(trace, (Phase.FIRST_DECODE, 1010.5), (Phase.DECODE, 1011.0), (Phase.DELIVERY, 1020.0))
        clock.now_s = 1021.0

    generate, stages = spans.all[-1], spans.all[:-1]
    assert {stage.name: seconds(stage) for stage in stages} == pytest.approx(
        {
            "tokenize": 1.0,
            "queue": 2.0,
            "prefill": 3.0,
            "transfer": 4.0,
            "bootstrap": 0.5,
            "first_decode": 0.5,
            "decode": 9.0,
            "delivery": 1.0,
        }
    )
    assert sum(map(seconds, stages)) == pytest.approx(seconds(generate)) == pytest.approx(21.0)
    assert generate.parent is not None and f"{generate.parent.span_id:016x}" == "cd" * 8
    assert parent_ids(stages) == {generate.context.span_id}
    assert trace.traceparent == f"00-{'ab' * 16}-{generate.context.span_id:016x}-01"
    assert trace.trace_id == "ab" * 16


def test_the_first_token_is_a_span_from_the_engine_to_the_clients_stream(spans: EndedSpans, clock: Clock) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([]) as trace:
        trace.submitted()
        reaches(trace, (Phase.PREFILL, 1001.0), (Phase.TRANSFER, 1001.0), (Phase.BOOTSTRAP, 1002.0))
        reaches(trace, (Phase.FIRST_DECODE, 1003.0), (Phase.DECODE, 1004.0))
        for clock.now_s in (1003.5, 1006.0):
            trace.output_written()

    assert seconds(spans.named("first_token")) == pytest.approx(0.5)


def test_the_wait_for_a_grammar_is_a_span_while_the_request_is_tokenised(spans: EndedSpans, clock: Clock) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([]) as trace:
        clock.now_s = 1001.0
        with pytest.raises(InvalidRequest), trace.grammar("regex"):
            clock.now_s = 1003.0
            raise InvalidRequest("sampling.regex", "is refused")
        clock.now_s = 1004.0
        trace.submitted()

    assert (seconds(spans.named("grammar")), seconds(spans.named("tokenize"))) == (2.0, 4.0)
    assert spans.named("grammar").attributes == {"baton.grammar.kind": "regex"}
    assert parent_ids([spans.named("grammar")]) == {spans.named("Generate").context.span_id}


def test_a_lost_handoff_and_a_retraction_show_as_further_stages(spans: EndedSpans, clock: Clock) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([]) as trace:
        trace.submitted()
        trace.on_phase(PhaseBegan("r", Phase.PREFILL, 1001.0, replica="a:1", attempt=0))
        trace.on_phase(PhaseBegan("r", Phase.QUEUE, 1002.0, lost="it died"))
        trace.on_phase(PhaseBegan("r", Phase.PREFILL, 1004.0, replica="b:1", attempt=1, num_held_tokens=5))
        reaches(trace, (Phase.TRANSFER, 1005.0), (Phase.BOOTSTRAP, 1006.0), (Phase.FIRST_DECODE, 1007.0))
        clock.now_s = 1008.0
        trace.output_written()
        trace.on_phase(PhaseBegan("r", Phase.QUEUE, 1009.0, was_retracted=True))
        reaches(trace, (Phase.PREFILL, 1009.0), (Phase.TRANSFER, 1009.0), (Phase.BOOTSTRAP, 1009.0))
        reaches(trace, (Phase.FIRST_DECODE, 1009.5))
        clock.now_s = 1010.0
        trace.output_written()

    assert spans.names() == [
        *("tokenize", "queue", "prefill", "queue", "prefill", "transfer", "bootstrap", "first_token", "first_decode"),
        *("queue", "prefill", "transfer", "bootstrap", "first_decode", "Generate"),
    ], "a request has one first token"
    first, second, _ = [span for span in spans.all if span.name == "prefill"]
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "it died")
    assert first.attributes == {"baton.replica": "a:1", "baton.attempt": 0, "baton.num_held_tokens": 0}
    assert second.attributes == {"baton.replica": "b:1", "baton.attempt": 1, "baton.num_held_tokens": 5}
    assert second.status.status_code is StatusCode.UNSET
    (retracted,) = spans.named("Generate").events
    queued_again = spans.all[-6]
    assert (retracted.name, retracted.timestamp) == ("retracted", queued_again.start_time)
    assert spans.named("Generate").status.status_code is StatusCode.UNSET


def test_a_prompt_that_is_computed_here_says_how_much_was_held(spans: EndedSpans, clock: Clock) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([]) as trace:
        trace.submitted()
        trace.on_phase(PhaseBegan("r", Phase.LOCAL_PREFILL, 1001.0, num_held_tokens=7))
        reaches(trace, (Phase.BOOTSTRAP, 1002.0))

    assert spans.named("local_prefill").attributes == {"baton.num_held_tokens": 7}
    assert not spans.named("bootstrap").attributes


def test_an_error_shows_on_the_request_and_on_the_stage_it_came_in(spans: EndedSpans, clock: Clock) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([]) as trace:
        trace.submitted()
        reaches(trace, (Phase.PREFILL, 1001.0))
        trace.failed(EngineFault("broken"))

    assert [(span.name, span.status.status_code.name) for span in spans.all] == [
        ("tokenize", "UNSET"),
        ("queue", "UNSET"),
        ("prefill", "ERROR"),
        ("Generate", "ERROR"),
    ]
    assert spans.named("Generate").attributes is not None
    assert spans.named("Generate").attributes["error.type"] == "ENGINE_FAULT"


def test_a_stage_that_the_engine_saw_before_the_edge_submitted_has_no_negative_length(
    spans: EndedSpans, clock: Clock
) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([]) as trace:
        clock.now_s = 1002.0
        trace.submitted()
        reaches(trace, (Phase.PREFILL, 1001.9), (Phase.TRANSFER, 1003.0))

    assert seconds(spans.named("queue")) == 0.0
    assert seconds(spans.named("prefill")) == pytest.approx(1.0)
    assert seconds(spans.named("transfer")) == 0.0, "the edge's clock was behind"


def test_what_comes_after_the_end_is_dropped(spans: EndedSpans, clock: Clock) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([]) as trace:
        trace.submitted()
    num_spans = len(spans.all)
    reaches(trace, (Phase.PREFILL, 1001.0), (Phase.TRANSFER, 1003.0))

    assert len(spans.all) == num_spans


@pytest.mark.parametrize("flags", ["00", "02"])
def test_an_unsampled_request_records_nothing_and_stays_unsampled(spans: EndedSpans, clock: Clock, flags: str) -> None:
    with RequestTraces(spans.tracer, clock=clock).begin([("traceparent", SAMPLED[:-2] + flags)]) as trace:
        trace.describe(lambda: pytest.fail("nobody reads it"))
        trace.submitted()
        reaches(trace, (Phase.PREFILL, 1001.0))
        trace.failed(EngineFault("broken"))

    assert not spans.all and not trace.is_recording
    assert trace.trace_id == "ab" * 16
    assert int(trace.traceparent[-2:], 16) & 1 == 0
