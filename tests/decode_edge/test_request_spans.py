"""The spans that the decode edge adds to a caller's trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry.trace import StatusCode
from structlog.testing import capture_logs

from baton.v1 import inference_pb2
from common.errors import EngineFault
from common.telemetry.stats import SpeculationCounts, Timings
from decode_service.messages import Failed, Finished, FinishReason
from tests.decode_edge.edge_under_test import AloneContext, Edge, events_of, running_edge, tokens_of
from tests.decode_edge.fake_engine import until
from tests.tracing.spans import EndedSpans

CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"
COUNTS = SpeculationCounts(2, 6, 3, 1, drafted_at=(2, 2, 2), accepted_at=(2, 1, 0), draft_s=0.5)


@pytest.fixture
def spans() -> EndedSpans:
    return EndedSpans()


@pytest.fixture
async def traced(spans: EndedSpans) -> AsyncIterator[Edge]:
    with capture_logs() as log:
        async with running_edge(log, tracer=spans.tracer) as running:
            yield running


def ask(edge: Edge, traceparent: str = CALLER, **fields: object) -> object:
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2]), **fields)  # type: ignore[arg-type]
    return edge.stub.Generate(request, metadata=(("traceparent", traceparent),))


async def test_the_engine_gets_the_requests_own_span_for_prefill_to_hang_its_spans_on(
    traced: Edge, spans: EndedSpans
) -> None:
    call = ask(traced)
    submit = await traced.engine.submitted()
    traced.deliver(Failed(submit.request_id, EngineFault("over")))
    with pytest.raises(Exception, match="over"):
        await events_of(call)
    await until(lambda: "Generate" in spans.names())

    generate = spans.named("Generate")
    assert submit.is_traced
    assert submit.traceparent == f"00-{'ab' * 16}-{generate.context.span_id:016x}-01"


async def test_a_request_that_is_not_sampled_is_not_traced_by_the_engine(traced: Edge, spans: EndedSpans) -> None:
    ask(traced, CALLER[:-2] + "00")
    submit = await traced.engine.submitted()

    assert not submit.is_traced and submit.traceparent.endswith("-00")


async def test_a_finished_requests_span_says_what_it_took(traced: Edge, spans: EndedSpans) -> None:
    call = ask(traced, request_id="mine", choice_index=2)
    submit = await traced.engine.submitted()
    timings = Timings(kv_bytes=77, num_handoff_attempts=2, num_retractions=1)
    traced.deliver(
        tokens_of(submit.request_id, (5,)),
        Finished(submit.request_id, FinishReason.LENGTH, 2, 1, timings, speculation=COUNTS),
    )
    await events_of(call)

    attributes = spans.named("Generate").attributes
    assert attributes is not None
    assert (attributes["baton.request_id"], attributes["baton.choice_index"]) == ("mine", 2)
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (62, 1.0)
    assert attributes["gen_ai.usage.input_tokens"] == 2
    assert attributes["gen_ai.usage.output_tokens"] == 1
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (attributes["baton.kv_bytes"], attributes["baton.num_handoff_attempts"]) == (77, 2)
    assert attributes["baton.num_retractions"] == 1
    assert attributes["baton.speculation.num_accepted_tokens"] == 3
    assert attributes["baton.speculation.num_forced_tokens"] == traced.count("baton_forced_tokens_total") == 1
    assert attributes["baton.speculation.accepted_at"] == (2, 1, 0)
    assert spans.named("Generate").status.status_code is StatusCode.UNSET
    (line,) = [line for line in traced.log if line["event"] == "request_finished"]
    assert line["trace_id"] == "ab" * 16


async def test_a_refused_request_has_a_span_that_says_why(traced: Edge, spans: EndedSpans) -> None:
    with pytest.raises(Exception, match="lora"):
        await events_of(ask(traced, lora="x"))
    await until(lambda: "Generate" in spans.names())

    generate = spans.named("Generate")
    assert generate.status.status_code is StatusCode.ERROR and "lora" in str(generate.status.description)
    assert generate.attributes is not None and generate.attributes["error.type"] == "INVALID_FIELD"


class ReadsAllButTheEnd(AloneContext):
    """A client that stops reading just before the end of its stream."""

    async def write(self, message: inference_pb2.GenerateEvent) -> None:
        if message.WhichOneof("event") == "finished":
            await asyncio.Event().wait()


async def test_a_client_that_does_not_take_the_ending_shows_as_an_error(traced: Edge, spans: EndedSpans) -> None:
    context = ReadsAllButTheEnd(remaining_s=60.0)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2]))
    call = asyncio.create_task(traced.servicer.Generate(request, context))  # type: ignore[arg-type]
    submit = await traced.engine.submitted()
    traced.deliver(Finished(submit.request_id, FinishReason.LENGTH, 2, 0, Timings()))
    with pytest.raises(grpc.aio.AbortError):
        await call

    attributes = spans.named("Generate").attributes
    assert attributes is not None and attributes["error.type"] == "CANCELLED"


async def test_a_service_that_does_not_trace_logs_the_callers_trace_if_there_is_one(edge: Edge) -> None:
    for number, begin in enumerate((lambda: ask(edge), edge.generate), start=1):
        call = begin()
        submit = await edge.engine.submitted(number)
        assert not submit.is_traced
        edge.deliver(Finished(submit.request_id, FinishReason.LENGTH, 2, 0, Timings()))
        await events_of(call)
    traced, untraced = (line for line in edge.log if line["event"] == "request_finished")
    assert (traced["trace_id"], "trace_id" in untraced) == ("ab" * 16, False)
