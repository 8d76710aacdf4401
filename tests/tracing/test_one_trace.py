"""Tests that one request makes one trace, from the caller through the decode service to the prefill service, and that
its times add up.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, use_span

from baton import errors
from tests.support.faulty_target import FailsFirst, is_decode
from tests.support.free_ports import free_address
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan, children_of, otlp_receiver
from tests.support.running_pair import wait_until
from tests.tracing.traced_pair import CHUNK_TOKENS, traced_pair

PROMPT = [20 + place % 40 for place in range(3 * CHUNK_TOKENS + 5)]
STAGES = ["tokenize", "queue", "prefill", "transfer", "bootstrap", "first_decode", "decode", "delivery"]


@pytest.fixture
def model(tiny_model_dir: Callable[[str], Path]) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


def only(name: str, spans: Sequence[ReceivedSpan]) -> ReceivedSpan:
    (span,) = [span for span in spans if span.name == name]
    return span


def stages_of(generate: ReceivedSpan, spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    """Returns the spans of a request's stages, in order. A stage may take no time."""
    children = [span for span in children_of(generate, spans) if span.service == generate.service]
    return sorted((span for span in children if span.name in STAGES), key=lambda span: (span.start_ns, span.end_ns))


def bytes_sent(row: ReceivedSpan, spans: Sequence[ReceivedSpan]) -> int:
    (send,) = [span for span in children_of(row, spans) if span.name == "send"]
    return int(send.attributes["baton.kv_bytes"])


def assert_they_fill(parent: ReceivedSpan, parts: Sequence[ReceivedSpan]) -> None:
    assert all(before.end_ns == after.start_ns for before, after in itertools.pairwise(parts))
    assert sum(part.seconds for part in parts) == pytest.approx(parent.seconds, rel=0.05)


async def test_a_grammar_shows_in_the_trace_and_in_the_metrics_of_both_services(
    model: Path, receiver: OtlpReceiver
) -> None:
    async with traced_pair(model, endpoint=receiver.endpoint) as pair:
        for _ in range(2):
            with pair.tracer.start_as_current_span("asking"):
                await pair.client.complete("a", regex="[ab]{6}", max_tokens=9)
        of_both = [service.registry.get_sample_value for service in (pair.prefill, pair.decode)]
        assert [value("baton_grammar_compile_seconds_count") for value in of_both] == [1, 1]
        assert [value("baton_cached_grammars_total") for value in of_both] == [1, 1]
        of_decode = of_both[1]
        assert of_decode("baton_constrained_requests_total", {"kind": "regex"}) == 2
        assert of_decode("baton_constrained_requests_total", {"kind": "choice"}) == 0
        counts = [f"baton_{name}_count" for name in ("masked_rows", "mask_seconds", "mask_wait_seconds")]
        # The engine notes its last step after the request's end.
        await asyncio.to_thread(wait_until, lambda: len({of_decode(name) for name in counts}) == 1)
        num_steps = of_decode(counts[0])
        assert num_steps is not None and num_steps >= 2
    spans = receiver.spans
    grammars = [span for span in spans if span.name == "grammar"]
    assert [span.attributes for span in grammars] == [{"baton.grammar.kind": "regex"}] * 2
    assert {span.parent_id for span in grammars} == {span.span_id for span in spans if span.name == "Generate"}


async def test_a_request_is_one_trace_of_the_caller_and_both_services(model: Path, receiver: OtlpReceiver) -> None:
    async with traced_pair(model, endpoint=receiver.endpoint) as pair:
        with pair.tracer.start_as_current_span("asking"):
            done = await pair.client.complete(token_ids=PROMPT, max_tokens=6, ignore_eos=True, request_id="r1")
    spans = receiver.spans

    asking, generate, row = only("asking", spans), only("Generate", spans), only("prefill_row", spans)
    assert {span.trace_id for span in spans} == {asking.trace_id}
    assert (generate.service, generate.parent_id) == ("decode_service", asking.span_id)
    assert (row.service, row.parent_id) == ("prefill_service", generate.span_id)
    assert generate.attributes["baton.request_id"] == "r1"
    assert generate.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert generate.attributes["gen_ai.usage.output_tokens"] == 6
    assert generate.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert generate.attributes["baton.kv_bytes"] == bytes_sent(row, spans) == done.timings.kv_bytes

    stages = stages_of(generate, spans)
    assert [stage.name for stage in stages] == STAGES
    assert_they_fill(generate, stages)
    first_token = only("first_token", spans)
    assert first_token.parent_id == generate.span_id
    assert first_token.start_ns == only("bootstrap", spans).end_ns
    assert first_token.end_ns <= generate.end_ns

    parts = children_of(row, spans)
    computing = [part for part in parts if part.name != "send"]
    assert [part.name for part in computing] == ["queue", "chunk", "chunk", "chunk", "chunk"]
    chunks = computing[1:]
    bounds = [(chunk.attributes["baton.token_start"], chunk.attributes["baton.token_stop"]) for chunk in chunks]
    assert bounds == [(0, 32), (32, 64), (64, 96), (96, 101)]
    assert [chunk.attributes["baton.batch.num_rows"] for chunk in chunks] == [1, 1, 1, 1]
    assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(computing))
    assert all(row.start_ns <= part.start_ns and part.end_ns <= row.end_ns for part in parts)
    assert not [span for span in spans if span.error is not None]


async def test_a_prompt_that_was_cached_shows_why_it_was_short(model: Path, receiver: OtlpReceiver) -> None:
    """The second request finds all tokens but the last in the caches of both services."""
    async with traced_pair(model, endpoint=receiver.endpoint) as pair:
        cached = []
        for _ in range(2):
            done = await pair.client.complete(token_ids=PROMPT, max_tokens=3, ignore_eos=True)
            cached.append(done.timings.num_cached_tokens)
    spans = receiver.spans

    assert cached == [0, len(PROMPT) - 1]
    for name in ("Generate", "prefill_row"):
        found = [span.attributes["gen_ai.usage.cache_read.input_tokens"] for span in spans if span.name == name]
        assert sorted(found) == cached
    for name in ("prefill", "prefill_row"):
        assert sorted(span.attributes["baton.num_held_tokens"] for span in spans if span.name == name) == cached


async def test_without_a_caller_the_decode_service_begins_the_trace(model: Path, receiver: OtlpReceiver) -> None:
    async with traced_pair(model, endpoint=receiver.endpoint) as pair:
        for _ in range(2):
            await pair.client.complete(token_ids=PROMPT[:5], max_tokens=2)

    generates = [span for span in receiver.spans if span.name == "Generate"]
    assert [generate.parent_id for generate in generates] == ["", ""]
    assert len({span.trace_id for span in receiver.spans}) == 2
    for generate in generates:
        assert_they_fill(generate, stages_of(generate, receiver.spans))


async def test_a_row_that_is_tried_again_shows_both_attempts(model: Path, receiver: OtlpReceiver) -> None:
    async with traced_pair(model, endpoint=receiver.endpoint) as pair:
        pair.prefill.model.fails = FailsFirst(lambda batch: not is_decode(batch))
        await pair.client.complete(token_ids=PROMPT[:20], max_tokens=3, ignore_eos=True)
    spans = receiver.spans

    generate = only("Generate", spans)
    stages = stages_of(generate, spans)
    assert [stage.name for stage in stages] == [STAGES[0], "queue", "prefill", *STAGES[1:]]
    assert_they_fill(generate, stages)
    first, second = [stage for stage in stages if stage.name == "prefill"]
    assert (first.attributes["baton.attempt"], second.attributes["baton.attempt"]) == (0, 1)
    assert first.error is not None and "planted" in first.error
    rows = [span for span in spans if span.name == "prefill_row"]
    assert [(row.parent_id, row.attributes["baton.attempt"]) for row in rows] == [
        (generate.span_id, 0),
        (generate.span_id, 1),
    ]
    assert rows[0].attributes["error.type"] == "COMPUTE" and rows[1].error is None
    assert generate.error is None and second.error is None
    assert generate.attributes["baton.num_handoff_attempts"] == 2


async def test_a_request_whose_step_fails_shows_where(model: Path, receiver: OtlpReceiver) -> None:
    async with traced_pair(model, endpoint=receiver.endpoint) as pair:
        pair.decode.model.fails = FailsFirst(is_decode)
        with pytest.raises(errors.Internal):
            await pair.client.complete(token_ids=PROMPT[:5], max_tokens=3, ignore_eos=True)

    generate = only("Generate", receiver.spans)
    stages = stages_of(generate, receiver.spans)
    assert generate.error is not None and "planted" in generate.error
    assert generate.attributes["error.type"] == "ENGINE_FAULT"
    assert [(stage.name, stage.error is not None) for stage in stages] == [
        *((name, False) for name in STAGES[:5]),
        ("first_decode", True),
    ]
    assert_they_fill(generate, stages)


async def test_a_request_whose_client_left_ends_as_cancelled(model: Path, receiver: OtlpReceiver) -> None:
    async with (
        traced_pair(model, endpoint=receiver.endpoint) as pair,
        pair.client.generate(token_ids=PROMPT[:5], max_tokens=2000, ignore_eos=True) as events,
    ):
        await anext(events)
        await anext(events)

    generate = only("Generate", receiver.spans)
    stages = stages_of(generate, receiver.spans)
    assert generate.attributes["error.type"] == "CANCELLED"
    assert generate.error is not None and stages[-1].error == generate.error
    assert not any(stage.error for stage in stages[:-1])
    assert_they_fill(generate, stages)


async def test_a_trace_that_its_caller_does_not_sample_is_not_exported(model: Path, receiver: OtlpReceiver) -> None:
    unsampled = NonRecordingSpan(SpanContext(trace_id=5, span_id=6, is_remote=True))
    async with traced_pair(model, endpoint=receiver.endpoint) as pair:
        with use_span(unsampled):
            await pair.client.complete(token_ids=PROMPT, max_tokens=2)

    assert not receiver.spans


async def test_with_tracing_off_nothing_is_exported(model: Path, receiver: OtlpReceiver) -> None:
    async with traced_pair(model, endpoint="", caller_endpoint=receiver.endpoint) as pair:
        with pair.tracer.start_as_current_span("asking"):
            await pair.client.complete(token_ids=PROMPT, max_tokens=2)

    assert [span.name for span in receiver.spans] == ["asking"]


async def test_a_decode_service_that_does_not_trace_passes_the_callers_trace_on(
    model: Path, receiver: OtlpReceiver
) -> None:
    async with traced_pair(model, endpoint=receiver.endpoint, decode_endpoint="") as pair:
        with pair.tracer.start_as_current_span("asking"):
            await pair.client.complete(token_ids=PROMPT, max_tokens=2)

    asking, row = only("asking", receiver.spans), only("prefill_row", receiver.spans)
    assert row.parent_id == asking.span_id
    assert {span.service for span in receiver.spans} == {"caller", "prefill_service"}


async def test_a_collector_that_is_not_there_costs_spans_only(model: Path) -> None:
    async with traced_pair(model, endpoint=f"http://{free_address()}") as pair:
        done = await pair.client.complete(token_ids=PROMPT, max_tokens=4, ignore_eos=True)

    assert len(done.token_ids) == 4
