from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from common.errors import PrefillUnavailable
from common.rpc.bearer_tokens import authorization
from common.sampling.params import TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.stats import Timings
from common.text.tokenizer import TextTokenizer
from decode_service.edge.live_request import Ending, LiveRequest
from decode_service.edge.text.output import OutputProcessor
from decode_service.edge.text.prompts import Prompts
from decode_service.messages import Abort, Failed, Finished, FinishReason, PromptScored, RowTaken, Submit, Tokens
from tests.decode_edge.edge_under_test import (
    MAX_LIVE,
    AloneContext,
    Edge,
    error_of,
    events_of,
    ids_in,
    running_edge,
    text_of,
    tokens_of,
)
from tests.decode_edge.fake_engine import BOUND_S, until
from tests.decode_edge.tokenizers_for_tests import byte_fallback, byte_level, eos_id, ids_of_pieces

A, B, C = ord("a"), ord("b"), ord("c")


def finished(request_id: str, num_tokens: int, reason: FinishReason = FinishReason.LENGTH, **more: object) -> Finished:
    timings = Timings(queue_s=0.25, prefill_s=0.5, kv_bytes=1000, num_handoff_attempts=1, num_cached_tokens=2)
    return Finished(request_id, reason, 3, num_tokens, timings, **more)  # type: ignore[arg-type]


def sampling(**fields: object) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(**fields)  # type: ignore[arg-type]


async def test_a_stream_is_started_then_deltas_then_finished(edge: Edge) -> None:
    call = edge.generate(request_id="r1", sampling=sampling(seed=7, max_tokens=3, stop=["bcd"]))
    submit = await edge.engine.submitted()
    edge.deliver(tokens_of(submit.request_id, (A, B)))
    edge.deliver(tokens_of(submit.request_id, (C,)), finished(submit.request_id, 3))

    events = await events_of(call)

    told = events[0].started
    assert (told.request_id, told.num_prompt_tokens, told.seed) == ("r1", 3, 7)
    assert ids_in(events) == [A, B, C]
    assert text_of(events) == "abc"
    last = events[-1].finished
    assert last.reason == inference_pb2.FINISH_REASON_LENGTH
    assert last.usage == inference_pb2.Usage(num_prompt_tokens=3, num_completion_tokens=3)
    assert (last.timings.queue_s, last.timings.kv_bytes, last.timings.num_handoff_attempts) == (0.25, 1000, 1)
    assert last.timings.num_cached_tokens == 2
    assert [event.WhichOneof("event") for event in events].count("finished") == 1


def scored(request_id: str, start: int, size: int) -> PromptScored:
    """Returns an event with the log-probabilities of `size` tokens of the prompt from `start` on. Each also has that of
    token A as the most likely one.
    """
    own = -np.arange(start, start + size, dtype=np.float32)
    ranks, top_ids = np.arange(start, start + size), np.full((size, 1), A)
    return PromptScored(request_id, PromptLogprobs(start, own, ranks, top_ids, np.full((size, 1), -0.5, np.float32)))


async def test_the_tokens_of_the_prompt_come_before_the_output(edge: Edge) -> None:
    call = edge.generate(
        token_ids=inference_pb2.TokenIds(ids=[C, A, B]), sampling=sampling(max_tokens=1, prompt_logprobs=1)
    )
    submit = await edge.engine.submitted()
    assert submit.sampling.num_prompt_logprobs == 1
    edge.deliver(scored(submit.request_id, 1, 1), scored(submit.request_id, 2, 1))
    edge.deliver(tokens_of(submit.request_id, (C,)), finished(submit.request_id, 1))

    events = await events_of(call)

    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["prompt_logprobs"] * 3, "delta", "finished"]
    assert [event.prompt_logprobs.start for event in events[1:4]] == [0, 1, 2]
    first, second, third = (token for event in events for token in event.prompt_logprobs.tokens)
    assert first == inference_pb2.PromptToken(token_id=C, token=b"c")
    likeliest = [types_pb2.TokenLogprob(token_id=A, logprob=-0.5, token=b"a")]
    assert second == inference_pb2.PromptToken(token_id=A, token=b"a", logprob=-1.0, rank=1, top=likeliest)
    assert third == inference_pb2.PromptToken(token_id=B, token=b"b", logprob=-2.0, rank=2, top=likeliest)


async def test_a_prompt_of_one_token_has_one_without_a_log_probability_and_no_output_is_needed(edge: Edge) -> None:
    call = edge.generate(token_ids=inference_pb2.TokenIds(ids=[C]), sampling=sampling(max_tokens=0, prompt_logprobs=0))
    submit = await edge.engine.submitted()
    assert submit.sampling.max_tokens == 0
    edge.deliver(finished(submit.request_id, 0))
    events = await events_of(call)
    assert [token.token_id for event in events for token in event.prompt_logprobs.tokens] == [C]
    assert events[-1].finished.usage.num_completion_tokens == 0


async def test_many_tokens_of_a_prompt_come_in_small_messages() -> None:
    live = LiveRequest("r1", "r1")
    live.begin(OutputProcessor(decoder=byte_fallback()), 1001)
    live.add_prompt_logprobs(scored("r1", 1, 1000).logprobs)
    live.finish(finished("r1", 0))
    sizes = []
    while isinstance(news := await live.read(), PromptLogprobs):
        assert news.start == 1 + sum(sizes)
        sizes.append(len(news.logprobs))
    assert isinstance(news, Ending)
    assert sizes == [256, 256, 256, 232]


async def test_the_log_probabilities_of_live_prompts_are_bounded() -> None:
    token_bytes = 12 * (1 + 1)
    wanted = sampling(max_tokens=0, prompt_logprobs=1)
    async with running_edge([], max_prompt_logprob_bytes=2 * 6 * token_bytes) as edge:
        first, second = edge.generate(sampling=wanted), edge.generate(sampling=wanted)
        submits = [await edge.engine.submitted(number) for number in (1, 2)]
        assert await error_of(edge.generate(sampling=wanted)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            {"retry_after_s": "1"},
        )
        third = edge.generate(sampling=sampling(max_tokens=1))
        submits.append(await edge.engine.submitted(3))
        edge.deliver(*(finished(submit.request_id, 0) for submit in submits))
        for call in (first, second, third):
            await events_of(call)
        fourth = edge.generate(token_ids=inference_pb2.TokenIds(ids=[C] * 9), sampling=wanted)
        edge.deliver(finished((await edge.engine.submitted(4)).request_id, 0))
        await events_of(fourth)


async def test_a_token_that_begins_the_prompt_has_no_space_of_its_own() -> None:
    tokenizer = byte_fallback()
    prompt = ids_of_pieces(tokenizer, ["<eos>", "▁ab", "▁ab"])
    async with running_edge([], tokenizer=tokenizer) as edge:
        call = edge.generate(
            token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling(max_tokens=0, prompt_logprobs=0)
        )
        submit = await edge.engine.submitted()
        columns = PromptLogprobs(
            1, np.zeros(2, np.float32), np.ones(2, np.int64), np.empty((2, 0), np.int64), np.empty((2, 0), np.float32)
        )
        edge.deliver(PromptScored(submit.request_id, columns), finished(submit.request_id, 0))
        events = await events_of(call)
    assert [token.token for event in events for token in event.prompt_logprobs.tokens] == [b"<eos>", b"ab", b" ab"]


@pytest.mark.parametrize("brought", [[], ["<pad>"]], ids=["new", "resumed"])
async def test_text_goes_on_where_the_prompt_ends(brought: list[str]) -> None:
    tokenizer = byte_fallback()
    prompt, word = ids_of_pieces(tokenizer, ["a", "<eos>"]), ids_of_pieces(tokenizer, ["▁ab"])
    async with running_edge([], tokenizer=tokenizer) as edge:
        call = edge.generate(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            generated_token_ids=ids_of_pieces(tokenizer, brought),
            sampling=sampling(logprobs=0),
        )
        submit = await edge.engine.submitted()
        edge.deliver(tokens_of(submit.request_id, word, [TokenLogprobs(-1.0, (), ())]), finished(submit.request_id, 1))
        events = await events_of(call)

    assert text_of(events) == " ab"
    assert [each.chosen.token for event in events for each in event.delta.logprobs] == [b" ab"]


async def test_the_client_is_told_the_numbers_in_use(edge: Edge) -> None:
    call = edge.generate(sampling=sampling(temperature=0.5, max_tokens=1))
    submit = await edge.engine.submitted()
    edge.deliver(finished(submit.request_id, 0))
    told = (await events_of(call))[0].started.sampling
    assert (told.temperature, told.top_p, told.top_k) == (0.5, 1.0, 0)
    assert told.HasField("top_p") and not told.HasField("max_tokens")


async def test_the_engine_gets_the_resolved_request(edge: Edge) -> None:
    edge.generate(
        token_ids=inference_pb2.TokenIds(ids=[1, 2]),
        generated_token_ids=[A],
        choice_index=3,
        cache_salt="tenant",
        sampling=sampling(
            temperature=0.0, stop_token_ids=[C], logit_bias={9: 1.0, 4: -1.0}, logprobs=0, prompt_logprobs=1
        ),
    )

    submit = await edge.engine.submitted()

    assert (submit.token_ids, submit.prompt_len) == ((1, 2, A), 2)
    assert (submit.choice_index, submit.cache_salt) == (3, "tenant")
    assert submit.sampling.is_greedy
    assert submit.sampling.max_tokens == 62  # the room that the context leaves
    assert submit.sampling.end_token_ids == (eos_id(edge.tokenizer), C)
    assert submit.sampling.logit_bias == ((4, -1.0), (9, 1.0))
    assert submit.sampling.num_logprobs == 0
    assert submit.sampling.num_prompt_logprobs is None, "they came before the output that the request brings"


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        (f"00-{'ab' * 16}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'cd' * 8}-01"),
        ("x" * 8000, ""),
        (f"00-{'ab' * 16}-{'cd' * 8}-01-more", ""),
    ],
)
async def test_a_trace_goes_on_to_the_prefill_service_when_it_is_one(edge: Edge, sent: str, passed_on: str) -> None:
    edge.stub.Generate(
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1])), metadata=(("traceparent", sent),)
    )
    assert (await edge.engine.submitted()).traceparent == passed_on


async def test_an_absent_seed_is_drawn_once_and_told_to_the_client(edge: Edge) -> None:
    first, second = edge.generate(), edge.generate()
    submits = [await edge.engine.submitted(1), await edge.engine.submitted(2)]

    seeds = {submit.sampling.seed for submit in submits}
    started = [(await call.read()).started.seed for call in (first, second)]

    assert len(seeds) == 2
    assert set(started) == seeds


async def test_a_stop_string_ends_ids_logprobs_and_usage_at_the_token_that_completes_it(edge: Edge) -> None:
    call = edge.generate(request_id="r1", sampling=sampling(stop=["bc"], logprobs=1))
    submit = await edge.engine.submitted()
    logprobs = tuple(TokenLogprobs(-float(index), (A,), (-0.5,)) for index in range(5))
    edge.deliver(tokens_of(submit.request_id, (A, B, C, A, A), logprobs))

    stop = await edge.engine.stopped()
    edge.deliver(tokens_of(submit.request_id, (A,), logprobs[:1]), finished(submit.request_id, 6))
    events = await events_of(call)

    assert (stop.num_output_tokens, stop.stop_string) == (3, "bc")
    assert ids_in(events) == [A, B, C]
    assert text_of(events) == "a"
    entries = [entry for event in events for entry in event.delta.logprobs]
    assert [entry.chosen.token_id for entry in entries] == [A, B, C]
    assert [entry.chosen.token for entry in entries] == [b"a", b"b", b"c"]
    assert [(entry.top[0].token_id, entry.top[0].logprob, entry.top[0].token) for entry in entries] == [
        (A, -0.5, b"a")
    ] * 3
    last = events[-1].finished
    assert (last.reason, last.stop_string) == (inference_pb2.FINISH_REASON_STOP_STRING, "bc")
    assert last.usage.num_completion_tokens == 3
    assert edge.count("baton_output_tokens_total") == 3


async def test_an_ending_token_is_in_ids_and_usage_and_not_in_the_text(edge: Edge) -> None:
    call = edge.generate(sampling=sampling(stop_token_ids=[C]))
    submit = await edge.engine.submitted()
    edge.deliver(
        tokens_of(submit.request_id, (A, C)), finished(submit.request_id, 2, FinishReason.STOP_TOKEN, stop_token_id=C)
    )

    events = await events_of(call)

    assert (ids_in(events), text_of(events)) == ([A, C], "a")
    assert events[-1].finished.stop_token_id == C
    assert events[-1].finished.usage.num_completion_tokens == 2


async def test_a_request_chooses_whether_its_text_has_special_tokens_and_what_ended_it(edge: Edge) -> None:
    eos, pad = eos_id(edge.tokenizer), max(edge.tokenizer.special_ids)
    texts = []
    for options in (
        {},
        {"skip_special_tokens": True, "include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
        {"shown_special_tokens": ["<pad>", "a", "nobody's"], "include_stop_str_in_output": True},
        {"shown_special_tokens": ["<eos>"], "include_stop_str_in_output": True},
        {"shown_special_tokens": ["<eos>b<pad>"], "include_stop_str_in_output": True},
    ):
        call = edge.generate(sampling=sampling(**options))
        submit = await edge.engine.submitted(len(texts) + 1)
        edge.deliver(tokens_of(submit.request_id, (A, pad, B, eos)))
        edge.deliver(finished(submit.request_id, 4, FinishReason.EOS))
        events = await events_of(call)
        texts.append(text_of(events))
        assert ids_in(events) == [A, pad, B, eos]

    assert texts == ["ab", "ab", "a<pad>b", "a<pad>b<eos>", "a<pad>b", "ab<eos>", "a<pad>b<eos>"]


async def test_a_resumed_stream_sends_only_what_is_new_and_counts_everything(edge: Edge) -> None:
    call = edge.generate(generated_token_ids=[A, B], sampling=sampling(stop=["cc"], max_tokens=5))
    submit = await edge.engine.submitted()
    edge.deliver(tokens_of(submit.request_id, (C, C)))

    stop = await edge.engine.stopped()
    edge.deliver(finished(submit.request_id, 4, FinishReason.STOP_STRING))
    events = await events_of(call)

    assert stop.num_output_tokens == 4
    assert ids_in(events) == [C, C]
    assert events[-1].finished.usage == inference_pb2.Usage(num_prompt_tokens=3, num_completion_tokens=4)


async def test_what_a_slow_client_has_not_read_is_merged(edge: Edge) -> None:
    live = edge.live_requests.admit("slow")
    live.begin(OutputProcessor(decoder=edge.tokenizer), 3)
    for token_id in (A, B, C):
        edge.live_requests.dispatch(tokens_of(live.engine_id, (token_id,)))

    piece = await live.read()

    assert (piece.token_ids, piece.text) == ((A, B, C), "abc")  # type: ignore[union-attr]
    edge.live_requests.release(live)


async def test_what_a_slow_client_has_not_read_comes_in_pieces_if_it_has_log_probabilities(edge: Edge) -> None:
    live = edge.live_requests.admit("slow")
    live.begin(OutputProcessor(decoder=edge.tokenizer), 3)
    logprobs = TokenLogprobs(-1.0, (A, B), (-1.0, -2.0))
    for token_ids in ((A,) * 200, (B,) * 100, (C,) * 300):
        edge.live_requests.dispatch(tokens_of(live.engine_id, token_ids, logprobs=(logprobs,) * len(token_ids)))
    edge.live_requests.dispatch(finished(live.engine_id, 600))

    pieces = [await live.read() for _ in range(5)]

    assert [(len(piece.token_ids), len(piece.logprobs)) for piece in pieces[:-1]] == [  # type: ignore[union-attr]
        (200, 200),
        (100, 100),
        (256, 256),
        (44, 44),
    ]
    assert "".join(piece.text for piece in pieces[:-1]) == "a" * 200 + "b" * 100 + "c" * 300  # type: ignore[union-attr]
    assert isinstance(pieces[-1], Ending)
    edge.live_requests.release(live)


async def test_a_failed_request_ends_with_its_error(edge: Edge) -> None:
    call = edge.generate()
    submit = await edge.engine.submitted()
    edge.deliver(Failed(submit.request_id, PrefillUnavailable("no replica took it")))

    assert await error_of(call) == (grpc.StatusCode.UNAVAILABLE, "NO_PREFILL", {})
    assert not edge.engine.of_type(Abort)


async def test_a_live_id_is_refused_and_free_again_afterwards(edge: Edge) -> None:
    first = edge.generate(request_id="r1")
    submit = await edge.engine.submitted()

    code, reason, metadata = await error_of(edge.generate(request_id="r1"))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
    assert metadata["request_id"] == "r1"

    edge.deliver(finished(submit.request_id, 0))
    await events_of(first)
    edge.generate(request_id="r1")
    await edge.engine.submitted(2)


async def test_an_aborted_requests_events_never_reach_its_successor_with_the_same_id(edge: Edge) -> None:
    first = edge.generate(request_id="r1")
    old = await edge.engine.submitted()
    first.cancel()
    await edge.engine.aborted()
    second = edge.generate(request_id="r1")
    new = await edge.engine.submitted(2)

    edge.deliver(tokens_of(old.request_id, (A,)), tokens_of(new.request_id, (B,)), finished(new.request_id, 1))

    assert ids_in(await events_of(second)) == [B]


async def test_a_client_that_has_all_places_keeps_no_other_out_however_many_connections_it_opens() -> None:
    tokens = "first-token", "second-token"
    first, second = [authorization(token) for token in tokens]
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]))
    async with running_edge([], tokens=tokens) as edge, own_connection(edge) as channel:
        for num in range(MAX_LIVE):
            edge.stub.Generate(request, metadata=first)
            await edge.engine.submitted(num + 1)
        code, reason, told = await error_of(edge.stub.Generate(request, metadata=first))
        assert (code, reason, told) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", {"retry_after_s": "1"})

        again = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=first)
        assert (await error_of(again))[1] == "QUEUE_FULL"
        assert (await edge.stub.Generate(request, metadata=second).read()).WhichOneof("event") == "started"
        assert {each.client for each in edge.engine.of_type(Submit)} == {"token 0", "token 1"}, "who share rows too"
        edge.router.on_death(RuntimeError("the test is over"))
        await edge.live_requests.wait_idle()


async def test_this_machine_without_tokens_is_one_client_however_many_connections_it_opens(edge: Edge) -> None:
    for num in range(MAX_LIVE):
        edge.generate()
        await edge.engine.submitted(num + 1)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]))
    async with own_connection(edge) as channel:
        assert (await error_of(inference_pb2_grpc.InferenceStub(channel).Generate(request)))[1] == "QUEUE_FULL"


def own_connection(edge: Edge) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(edge.address, options=[("grpc.use_local_subchannel_pool", 1)])


async def test_a_request_refused_for_its_fields_takes_no_place(edge: Edge) -> None:
    for _ in range(MAX_LIVE + 1):
        code, _, _ = await error_of(edge.generate(text="x" * 200))
        assert code == grpc.StatusCode.INVALID_ARGUMENT

    assert len(edge.live_requests) == 0
    assert not edge.engine.commands


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_dropping_the_stream_aborts_exactly_once(edge: Edge, num_tokens: int) -> None:
    call = edge.generate()
    submit = await edge.engine.submitted()
    edge.deliver(tokens_of(submit.request_id, (A,) * num_tokens))
    for _ in range(2 if num_tokens else 1):
        await call.read()

    call.cancel()

    assert await edge.engine.aborted() == Abort(submit.request_id)
    await edge.live_requests.wait_idle()
    assert edge.count("baton_requests_total", outcome="cancelled") == 1


async def test_a_deadline_reaches_the_engine_and_aborts(edge: Edge) -> None:
    await asyncio.wait_for(edge.channel.channel_ready(), BOUND_S)
    for timeout_s in (0.3, 3.0, 20.0):  # on a busy machine, the first may pass before the request is there
        ending = asyncio.create_task(events_of(edge.generate(timeout=timeout_s)))
        submitting = asyncio.create_task(edge.engine.submitted())
        await asyncio.wait((ending, submitting), return_when=asyncio.FIRST_COMPLETED)
        submitting.cancel()
        latest_s = time.monotonic() + timeout_s
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await ending
        assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if edge.engine.of_type(Submit):
            break
    submit = await edge.engine.submitted()

    assert submit.deadline_s < latest_s + 0.1, "gRPC counts what is left by the time of day"
    assert await edge.engine.aborted() == Abort(submit.request_id)


async def ended_by_the_service(edge: Edge, context: AloneContext) -> grpc.StatusCode | None:
    """Returns the code with which the service ends a call that nothing else ends. Its request must be aborted once."""
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
    with pytest.raises(grpc.aio.AbortError):
        await asyncio.wait_for(edge.servicer.Generate(request, context), BOUND_S)  # type: ignore[arg-type]
    submit = await edge.engine.submitted()
    assert edge.engine.of_type(Abort) == [Abort(submit.request_id)]
    assert len(edge.live_requests) == 0
    return context.code


async def test_the_service_keeps_the_deadline_by_itself(edge: Edge) -> None:
    code = await ended_by_the_service(edge, AloneContext(remaining_s=0.05))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert edge.count("baton_requests_total", outcome="deadline") == 1


async def test_a_client_that_reads_nothing_counts_as_gone() -> None:
    async with running_edge([], client_stall_timeout_s=0.2) as edge:
        code = await ended_by_the_service(edge, AloneContext(remaining_s=60.0, reads=False))
    assert code is grpc.StatusCode.CANCELLED


async def test_every_stream_ends_when_the_engine_dies(edge: Edge) -> None:
    calls = [edge.generate(), edge.generate()]
    await edge.engine.submitted(2)

    edge.engine.die()
    edge.router.on_death(RuntimeError("poisoned"))

    for call in calls:
        assert (await error_of(call))[:2] == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
    assert (await error_of(edge.generate()))[:2] == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")


class BreaksAtC(TextTokenizer):
    """A tokenizer that fails at the token C."""

    def decode(self, token_ids: Sequence[int]) -> str:
        if C in token_ids:
            raise RuntimeError("cannot decode this")
        return super().decode(token_ids)


async def test_one_requests_broken_output_fails_alone() -> None:
    tokenizer = byte_level()
    tokenizer.__class__ = BreaksAtC
    async with running_edge([], tokenizer=tokenizer) as edge:
        good, bad = edge.generate(request_id="good"), edge.generate(request_id="bad")
        await edge.engine.submitted(2)
        by_id = {submit.request_id.partition("#")[0]: submit.request_id for submit in edge.engine.of_type(Submit)}

        edge.deliver(Tokens((by_id["bad"], by_id["good"]), (1, 1), (C, B)), finished(by_id["good"], 1))

        assert (await error_of(bad))[:2] == (grpc.StatusCode.INTERNAL, "ENGINE_FAULT")
        assert ids_in(await events_of(good)) == [B]
        await edge.engine.aborted()


async def test_while_draining_nothing_is_admitted_and_what_runs_goes_on(edge: Edge) -> None:
    call = edge.generate()
    submit = await edge.engine.submitted()

    edge.live_requests.drain()

    assert (await error_of(edge.generate()))[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    idle = asyncio.create_task(edge.live_requests.wait_idle())
    edge.deliver(tokens_of(submit.request_id, (A,)), finished(submit.request_id, 1))
    assert ids_in(await events_of(call)) == [A]
    await asyncio.wait_for(idle, BOUND_S)


async def test_one_line_and_one_count_for_each_request(edge: Edge) -> None:
    call = edge.generate(request_id="r1")
    submit = await edge.engine.submitted()
    edge.deliver(tokens_of(submit.request_id, (A, B)), finished(submit.request_id, 2, FinishReason.EOS))
    await events_of(call)
    await until(lambda: any(line["event"] == "request_finished" for line in edge.log))

    (line,) = [line for line in edge.log if line["event"] == "request_finished"]
    assert (line["request_id"], line["outcome"], line["log_level"]) == ("r1", "eos", "info")
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (3, 2)
    assert (line["queue_s"], line["prefill_s"], line["kv_bytes"]) == (0.25, 0.5, 1000)
    assert edge.count("baton_requests_total", outcome="eos") == 1
    assert edge.count("baton_handoff_bytes_total") == 1000
    assert edge.count("baton_prefill_seconds_sum") == 0.5
    assert (edge.count("baton_prefill_seconds_count"), edge.count("baton_transfer_seconds_count")) == (1, 0), (
        "phases that the request was not in count neither"
    )


@pytest.mark.parametrize("tells_tenants_apart", [False, True])
async def test_a_tenant_shares_the_service_under_its_own_name_or_what_its_client_has(tells_tenants_apart: bool) -> None:
    async with running_edge([], tells_tenants_apart=tells_tenants_apart) as edge:
        calls = []
        for number, fields in enumerate(({"tenant": "a"}, {"tenant": "b"}, {}), start=1):
            calls.append(edge.generate(**fields))
            await edge.engine.submitted(number)
        submits = edge.engine.of_type(Submit)
    clients, tenants = [each.client for each in submits], [each.tenant for each in submits]
    assert clients == (["tenant a", "tenant b", "loopback"] if tells_tenants_apart else ["loopback"] * 3)
    assert tenants == ([""] * 3 if tells_tenants_apart else ["a", "b", ""])


@pytest.mark.parametrize("tells_tenants_apart", [False, True])
async def test_texts_take_turns_under_the_names_of_their_client_and_tenant(
    tells_tenants_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[tuple[str, Any]] = []

    def note_caller(name: str) -> None:
        method = getattr(Prompts, name)

        async def noted(*args: Any, caller: Any, **options: Any) -> Any:
            callers.append((name, caller))
            return await method(*args, caller=caller, **options)

        monkeypatch.setattr(Prompts, name, noted)

    for name in ("encode", "spell", "replay"):
        note_caller(name)
    async with running_edge([], tells_tenants_apart=tells_tenants_apart) as edge:
        edge.generate(tenant="a", sampling={"bad_words": ["z"]}, generated_token_ids=[70])
        await edge.engine.submitted()
        named = ("tenant a", "") if tells_tenants_apart else ("loopback", "a")
        assert callers == [("encode", named), ("spell", named), ("replay", named), ("replay", named)]
        for tenant, whose in (({"tenant": "a"}, named), ({}, ("loopback", ""))):
            callers.clear()
            await edge.stub.Tokenize(inference_pb2.TokenizeRequest(text="hi", with_pieces=True, **tenant))
            await edge.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[70], **tenant))
            assert callers == [(name, whose) for name in ("encode", "replay", "replay")]


async def test_a_tenant_that_has_all_places_keeps_no_other_out_for_long(edge: Edge) -> None:
    calls = [edge.generate(tenant="a") for _ in range(MAX_LIVE)]
    await edge.engine.submitted(MAX_LIVE)
    assert (await error_of(edge.generate(tenant="b")))[1] == "QUEUE_FULL"
    calls[0].cancel()
    await edge.engine.aborted()
    request = inference_pb2.TokenizeRequest(text="hi", tenant="a")
    assert (await error_of(edge.stub.Tokenize(request)))[1] == "QUEUE_FULL", "the place is kept for the other tenant"
    request.tenant = "b"
    assert (await edge.stub.Tokenize(request)).token_ids


async def test_a_full_service_sheds_what_it_would_serve_last(edge: Edge) -> None:
    """Requests of a worse priority give their places up, the worst one first, unless they have had rows."""
    shed, asked = [], ((5, "row"), (2, "waits"), (5, "waits"))
    calls = [edge.generate(request_id=f"{priority} {what}", priority=priority) for priority, what in asked]
    submitted = {(await edge.engine.submitted(num)).request_id: num for num in range(1, 1 + MAX_LIVE)}
    row_id = next(engine_id for engine_id in submitted if engine_id.startswith("5 row"))
    edge.deliver(RowTaken(row_id))
    better = [edge.generate(priority=1)]
    shed.append(await edge.engine.aborted(1))
    better.append(edge.generate(priority=0))
    shed.append(await edge.engine.aborted(2))
    assert [abort.request_id.partition("#")[0] for abort in shed] == ["5 waits", "2 waits"]
    code, reason, metadata = await error_of(calls[2])
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert int(metadata["retry_after_s"]) >= 1

    refused = edge.generate(priority=1)

    assert (await error_of(refused))[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert len(edge.engine.of_type(Abort)) == 2, "it took the place of one that is not worse, or that has a row"
    for call in (*calls, *better):
        call.cancel()
    await edge.live_requests.wait_idle()
    again = [edge.generate() for _ in range(MAX_LIVE)]
    await edge.engine.submitted(2 * MAX_LIVE + 2)
    assert (await error_of(edge.generate()))[1] == "QUEUE_FULL"
    del again
