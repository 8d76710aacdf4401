"""Tests of the prefill service's edge, as seen by a receiver that sends raw bytes and by the engine that it serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.v1 import prefill_pb2, prefill_pb2_grpc
from common.errors import ContextExceeded, InvalidRequest, Overloaded, RowFailure, error_for_row_failure
from common.grammar.grammar import Grammar, GrammarKind, TokenRules
from common.grammar.reasoning import Reasoning
from common.rpc.errors import error_info
from common.rpc.grpc_options import channel_options
from common.service.server import ServerLimits, ServiceServer
from common.telemetry.stats import EngineLoad, PoolCounts, PrefixCounts
from common.wire.codec_commands import encode_cancel_rows, encode_prefill_batch
from common.wire.codec_fingerprint import PROTOCOL_VERSION, decode_fingerprint, encode_fingerprint
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import Fingerprint
from common.wire.framing import seal_bytes
from common.wire.handoff import Accepted, Frame, HandoffRow, RowFailed, unsent_bytes
from prefill_service.edge.call import ReplicaLimits
from prefill_service.edge.prefill_edge import PREFILL_SERVICE
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from prefill_service.messages import BytesSent, CancelCallRows, Command, FailRow, GiveMatcher, OpenCall
from tests.handoff.samples import FINGERPRINT, SEGMENT_BYTES, failed, logprobs, prebuilt, row, segment
from tests.handoff.scripted_prefill import BOUND_S, ScriptedPrefill
from tests.support.prefill_edge import running_prefill_edge
from tests.wire.strategies import VOCAB_SIZE, comparable

MAX_ROWS = 4
CODEC = FrameCodec(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE)
Call = grpc.aio.StreamStreamCall[bytes, bytes]


async def bounded(work: Awaitable[object]) -> object:
    async with asyncio.timeout(BOUND_S):
        return await work


@dataclass(frozen=True)
class Edge:
    prefill: ScriptedPrefill
    servicer: PrefillServicer
    server: ServiceServer
    channel: grpc.aio.Channel
    address: str

    async def open(self, *rows: HandoffRow, fingerprint: Fingerprint = FINGERPRINT) -> Call:
        call: Call = self.channel.stream_stream("/baton.v1.Prefill/Handoff")()
        await call.write(encode_prefill_batch(fingerprint, rows or (row(),)))
        return call

    async def opened(self) -> str:
        """Returns the engine's id of the only call that was opened."""
        return (await asyncio.to_thread(self.prefill.opened))[0].call_id

    async def closed(self, call_id: str) -> None:
        await asyncio.to_thread(self.prefill.closed, call_id)

    async def still_serves(self) -> None:
        before = len(self.prefill.commands.all())
        call = await self.open(row("healthy"))
        commands = await asyncio.to_thread(self.prefill.commands.wait_until, lambda values: len(values) > before)
        self.prefill.finish(commands[before].call_id)  # type: ignore[union-attr]
        await ends_well(call)


async def read(call: Call, rows: tuple[HandoffRow, ...]) -> Frame:
    data = await bounded(call.read())
    assert isinstance(data, bytes)
    return CODEC.decode(data, rows)


async def ends_well(call: Call) -> None:
    """Reads the call to its end, and asserts that its status is OK. A stream's status comes after its frames."""
    while await bounded(call.read()) is not grpc.aio.EOF:
        pass


async def status_of(call: Call) -> grpc.aio.AioRpcError:
    """Reads the call to its end, and returns the error with which it failed."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await bounded(call.read()) is not grpc.aio.EOF:
            pass
    return caught.value


async def refusal(call: Call) -> tuple[grpc.StatusCode, ErrorInfo]:
    """Reads the call to its end, and returns the code and details of the error with which it failed."""
    status = await status_of(call)
    info = error_info(status)
    assert info is not None
    return status.code(), info


async def row_failure(edge: Edge, refused: HandoffRow) -> RowFailed:
    """Sends a row that the edge refuses, and returns why. Asserts that the call ends without the engine."""
    call = await edge.open(refused)
    accepted, failure = [await read(call, (refused,)) for _ in range(2)]
    assert isinstance(accepted, Accepted) and isinstance(failure, RowFailed) and failure.row == 0
    assert await bounded(call.read()) is grpc.aio.EOF
    assert edge.prefill.commands.all() == []
    return failure


@asynccontextmanager
async def serve(limits: HandoffLimits, max_message_bytes: int = 1 << 20, **options: Any) -> AsyncIterator[Edge]:
    async with (
        running_prefill_edge(
            limits=limits,
            server_limits=ServerLimits(max_message_bytes=max_message_bytes),
            model_limits=ReplicaLimits(vocab_size=VOCAB_SIZE, max_context_tokens=256, max_cached_tokens=90),
            is_ready=False,
            **options,
        ) as edge,
        grpc.aio.insecure_channel(edge.address, options=channel_options()) as channel,
    ):
        yield Edge(edge.engine, edge.servicer, edge.server, channel, edge.address)


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serve(HandoffLimits(max_rows=MAX_ROWS, first_command_timeout_s=BOUND_S)) as edge:
        yield edge


# ---- refusals by the edge alone -----------------------------------------------------------------------------------


async def test_another_fingerprint_is_a_failed_precondition_naming_the_field(edge: Edge) -> None:
    code, info = await refusal(await edge.open(fingerprint=replace(FINGERPRINT, tokenizer_digest="other")))
    assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")
    assert dict(info.metadata) == {"field": "tokenizer_digest", "decode": "other", "prefill": "7e57"}
    assert edge.prefill.commands.all() == []


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_peer_of_another_protocol_version_is_told_which(edge: Edge, is_first: bool) -> None:
    """The peer's command has no checksum, since another version may compute it differently or not at all."""
    theirs = encode_fingerprint(replace(FINGERPRINT, protocol_version=8))
    command = prefill_pb2.HandoffCommand(prefill_batch=prefill_pb2.PrefillBatch(fingerprint=theirs))
    call: Call = edge.channel.stream_stream("/baton.v1.Prefill/Handoff")()
    if not is_first:
        await call.write(encode_prefill_batch(FINGERPRINT, (row(),)))
    await call.write(command.SerializeToString())
    code, info = await refusal(call)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert dict(info.metadata) == {"field": "protocol_version", "decode": "8", "prefill": str(PROTOCOL_VERSION)}


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (b"\xff\xff", "crc32c"),
        (b"", "crc32c"),
        (seal_bytes(b"\xff\xff"), "HandoffCommand"),
        (seal_bytes(b""), "command"),
        (encode_cancel_rows((0,)), "command"),
        (encode_prefill_batch(FINGERPRINT, ()), "prefill_batch.rows"),
        (encode_prefill_batch(FINGERPRINT, (row(),) * (MAX_ROWS + 1)), "prefill_batch.rows"),
    ],
    ids=["damaged", "nothing", "malformed", "unknown", "not a PrefillBatch", "no rows", "too many rows"],
)
async def test_a_broken_first_command_fails_its_call_naming_the_field(edge: Edge, first: bytes, field: str) -> None:
    call: Call = edge.channel.stream_stream("/baton.v1.Prefill/Handoff")()
    await call.write(first)
    code, info = await refusal(call)
    assert (code, info.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert edge.prefill.commands.all() == []
    await edge.still_serves()


async def test_a_stream_that_ends_before_its_first_command_is_refused(edge: Edge) -> None:
    call: Call = edge.channel.stream_stream("/baton.v1.Prefill/Handoff")()
    await call.done_writing()
    assert (await status_of(call)).code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_without_a_first_command_is_not_kept() -> None:
    async with serve(HandoffLimits(first_command_timeout_s=0.01)) as edge:
        call: Call = edge.channel.stream_stream("/baton.v1.Prefill/Handoff")()
        status = await status_of(call)
        assert status.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "prefill_batch: did not arrive" in (status.details() or "")


async def test_an_oversized_command_fails_its_call_only() -> None:
    async with serve(HandoffLimits(), max_message_bytes=1024) as edge:
        status = await status_of(await edge.open(*(row(num_tokens=256) for _ in range(4))))
        assert status.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert edge.prefill.commands.all() == []
        await edge.still_serves()


INVALID_ROWS = {
    f"token id {VOCAB_SIZE} is not below": replace(row(), token_ids=(0, VOCAB_SIZE), prompt_len=1),
    "token id 999 is not below": replace(row(), sampling=replace(row().sampling, stop_token_ids=(999,))),
    "token id 998 is not below": replace(row(), sampling=replace(row().sampling, eos_token_ids=(998,))),
    "token id 997 is not below": replace(row(), sampling=replace(row().sampling, logit_bias=((997, 1.0),))),
    "token id 996 is not below": replace(row(), sampling=replace(row().sampling, token_rules=TokenRules((1, 996)))),
    "token id 995 is not below": replace(
        row(), sampling=replace(row().sampling, token_rules=TokenRules(forbidden=((1,), (995, 2))))
    ),
    "token_ids: is empty": replace(row(), token_ids=()),
    "prompt_len: 129 is not in": replace(row(), prompt_len=129),
}


async def test_a_row_that_is_too_long_for_this_replica_may_go_to_another(edge: Edge) -> None:
    failure = await row_failure(edge, row(num_tokens=257))
    assert (failure.reason, failure.retryable) == (RowFailure.CONTEXT_EXCEEDED, True)
    assert failure.message == "257 tokens exceed the 256 that this prefill service takes"
    error = error_for_row_failure(failure.reason, failure.message)
    assert isinstance(error, ContextExceeded) and error.field == "prompt"


@pytest.mark.parametrize("message", INVALID_ROWS)
async def test_an_invalid_row_fails_for_good_and_the_call_ends_without_the_engine(edge: Edge, message: str) -> None:
    failure = await row_failure(edge, INVALID_ROWS[message])
    assert (failure.reason, failure.retryable) == (RowFailure.INVALID_ROW, False)
    assert failure.message.startswith(message)


async def test_rows_beside_an_invalid_one_keep_their_numbers(edge: Edge) -> None:
    rows = (row("bad", num_tokens=257), row("first"), row("second"))
    call = await edge.open(*rows)
    engine_call = await edge.opened()
    assert edge.prefill.opened()[0].rows == rows[1:]
    await call.write(encode_cancel_rows((2, 0)))
    await asyncio.to_thread(
        edge.prefill.commands.wait_until, lambda commands: CancelCallRows(engine_call, (1,)) in commands
    )
    edge.prefill.emit(engine_call, segment(0, 0), segment(1, 0), prebuilt(0), failed(1))
    edge.prefill.finish(engine_call)
    frames = [await read(call, rows) for _ in range(5)]
    assert isinstance(frames[1], RowFailed)
    assert frames[1].row == 0
    assert [comparable(frame) for frame in frames[2:]] == [
        comparable(segment(1, 0)),
        comparable(prebuilt(1)),
        comparable(failed(2)),
    ]
    assert await bounded(call.read()) is grpc.aio.EOF
    assert edge.prefill.sent_bytes() == 2 * SEGMENT_BYTES, "the cancelled row's segment returns its budget too"


def constrained(text: str) -> HandoffRow:
    brought = replace(row(text), prompt_len=126)
    return replace(brought, sampling=replace(brought.sampling, grammar=Grammar(GrammarKind.REGEX, text)))


async def matchers_of(edge: Edge, count: int) -> dict[int, Any]:
    """Waits until `count` rows have a matcher or have failed. Returns for each row its matcher or its RowFailed, in the
    order of the rows.
    """

    def made(commands: list[Command]) -> dict[int, Any]:
        given = {command.row: command.matcher for command in commands if isinstance(command, GiveMatcher)}
        failed = {command.failed.row: command.failed for command in commands if isinstance(command, FailRow)}
        return dict(sorted((given | failed).items()))

    return made(
        await asyncio.to_thread(edge.prefill.commands.wait_until, lambda commands: len(made(commands)) >= count)
    )


async def test_rows_whose_grammars_find_no_matcher_fail_alone() -> None:
    async def new_matcher(
        grammar: Grammar | None, output_ids: Sequence[int], reasoning: Reasoning | None, *, client: str
    ) -> Any:
        match grammar.text if grammar else "":
            case "bad":
                raise InvalidRequest("sampling.regex", "is bad")
            case "late":
                raise Overloaded("grammars wait")
            case "never":
                await asyncio.Event().wait()
        return grammar, reasoning, list(output_ids)

    def limited(max_tokens: int | None) -> HandoffRow:
        reasoning = Reasoning("<r>", "</r>", is_open=False, max_tokens=max_tokens)
        return replace(row("limited"), sampling=replace(row("limited").sampling, reasoning=reasoning))

    named = [constrained(text) for text in ("bad", "late", "never", "good")]
    rows = (row("free"), *named, limited(None), limited(3))
    async with serve(HandoffLimits(matcher_timeout_s=0.5), new_matcher=new_matcher) as edge:
        call = await edge.open(*rows)
        (opened,) = await asyncio.to_thread(edge.prefill.opened)
        assert opened.rows == rows
        refused, *late, good, three = (await matchers_of(edge, 5)).items()
        assert (refused[0], refused[1].reason, refused[1].retryable) == (1, RowFailure.CONSTRAINT, False)
        assert refused[1].message == "is bad"
        assert [(index, failed.reason, failed.retryable) for index, failed in late] == [
            (2, RowFailure.CAPACITY, True),
            (3, RowFailure.CAPACITY, True),
        ]
        assert good == (4, (Grammar(GrammarKind.REGEX, "good"), None, [126, 127]))
        assert three == (6, (None, Reasoning("<r>", "</r>", is_open=False, max_tokens=3), []))
        edge.prefill.finish(opened.call_id)
        await ends_well(call)


async def test_a_call_is_accepted_and_its_other_rows_are_served_while_a_grammar_is_compiled() -> None:
    compiled = asyncio.Event()

    async def new_matcher(
        grammar: Grammar, output_ids: Sequence[int], reasoning: Reasoning | None, *, client: str
    ) -> Any:
        if grammar.text == "slow":
            await compiled.wait()
        return grammar.text, client

    rows = (replace(constrained("slow"), client="a / x"), replace(constrained("fast"), client="b"))
    async with serve(HandoffLimits(), new_matcher=new_matcher) as edge:
        call = await edge.open(*rows)
        assert isinstance(await read(call, rows), Accepted)
        assert await matchers_of(edge, 1) == {1: ("fast", "b")}
        compiled.set()
        assert await matchers_of(edge, 2) == {0: ("slow", "a / x"), 1: ("fast", "b")}
        edge.prefill.finish(await edge.opened())
        await ends_well(call)


async def test_a_rows_rules_are_replayed_beside_the_event_loop(edge: Edge) -> None:
    free = threading.Event()
    executor = ThreadPoolExecutor(1)
    executor.submit(free.wait)
    asyncio.get_running_loop().set_default_executor(executor)
    try:
        rows = (replace(row(), sampling=replace(row().sampling, token_rules=TokenRules((1,)))),)
        call = await edge.open(*rows)
        assert isinstance(await read(call, rows), Accepted)
        assert [type(command) for command in edge.prefill.commands.all()] == [OpenCall]
    finally:
        free.set()
    assert list(await matchers_of(edge, 1)) == [0]
    edge.prefill.finish(await edge.opened())
    await ends_well(call)


async def test_output_against_the_rows_rules_fails_it_for_good(edge: Edge) -> None:
    rules = TokenRules(forbidden=((126, 127),))
    await edge.open(replace(row(), prompt_len=126, sampling=replace(row().sampling, token_rules=rules)))
    failed = (await matchers_of(edge, 1))[0]
    assert (failed.reason, failed.retryable) == (RowFailure.INVALID_ROW, False)
    assert failed.message == "generated_token_ids: token 127 at index 1 is not allowed"


async def test_a_row_whose_matcher_cannot_be_made_because_of_a_defect_fails_alone() -> None:
    async def new_matcher(
        grammar: Grammar, output_ids: Sequence[int], reasoning: Reasoning | None, *, client: str
    ) -> Any:
        if grammar.text == "bad":
            raise KeyError("defect")
        return grammar.text

    async with serve(HandoffLimits(), new_matcher=new_matcher) as edge:
        call = await edge.open(constrained("bad"), constrained("good"))
        failed, good = (await matchers_of(edge, 2)).values()
        assert (failed.reason, failed.retryable, good) == (RowFailure.COMPUTE, True, "good")
        assert "defect" in failed.message
        edge.prefill.finish(await edge.opened())
        await ends_well(call)


# ---- how a call ends ------------------------------------------------------------------------------------------------


async def test_what_is_sent_returns_its_budget_and_a_finished_call_is_not_closed(edge: Edge) -> None:
    call = await edge.open(row(num_prompt_logprobs=2))
    engine_call = await edge.opened()
    scored = logprobs(0, 1, 128)
    edge.prefill.emit(engine_call, segment(0, 0), scored, segment(0, 1), prebuilt(0))
    edge.prefill.finish(engine_call)
    await ends_well(call)
    sent = [command for command in edge.prefill.commands.all() if isinstance(command, BytesSent)]
    num_bytes = (SEGMENT_BYTES, unsent_bytes(scored), SEGMENT_BYTES)
    assert sent == [BytesSent(engine_call, each) for each in num_bytes]
    assert edge.prefill.num_closed() == 0
    assert edge.servicer.num_calls == 0


async def test_a_receiver_that_leaves_closes_the_call_once(edge: Edge) -> None:
    call = await edge.open()
    engine_call = await edge.opened()
    await bounded(call.read())
    call.cancel()
    await edge.closed(engine_call)
    edge.prefill.emit(engine_call, segment(0, 0))
    edge.prefill.finish(engine_call)
    await edge.still_serves()
    assert edge.prefill.num_closed() == 1
    assert edge.prefill.sent_bytes() == 0


async def test_a_receiver_that_leaves_after_the_last_row_still_closes_what_was_not_sent(edge: Edge) -> None:
    call = await edge.open(row(num_tokens=256))
    engine_call = await edge.opened()
    edge.prefill.emit(engine_call, *(segment(0, place) for place in range(8)))
    edge.prefill.finish(engine_call)
    await bounded(call.read())
    call.cancel()
    await edge.closed(engine_call)


async def test_a_receiver_that_takes_nothing_loses_the_call() -> None:
    async with serve(HandoffLimits(stall_timeout_s=1.0)) as edge:
        call = await edge.open(row(num_tokens=256))
        engine_call = await edge.opened()
        edge.prefill.emit(engine_call, *(segment(0, place) for place in range(8)))
        await edge.closed(engine_call)
        assert edge.servicer.num_calls == 0
        assert (await status_of(call)).code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (encode_prefill_batch(FINGERPRINT, (row(),)), "prefill_batch"),
        (encode_cancel_rows((1,)), "cancel_rows.rows"),
        (b"\xff\xff", "crc32c"),
    ],
    ids=["a second PrefillBatch", "a row out of range", "malformed"],
)
async def test_a_broken_later_command_fails_its_call_and_closes_it(edge: Edge, command: bytes, field: str) -> None:
    call = await edge.open()
    engine_call = await edge.opened()
    await call.write(command)
    code, info = await refusal(call)
    assert (code, info.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    await edge.closed(engine_call)
    await edge.still_serves()


async def test_a_receiver_may_close_its_side_and_still_be_served(edge: Edge) -> None:
    call = await edge.open()
    await call.done_writing()
    engine_call = await edge.opened()
    edge.prefill.emit(engine_call, prebuilt(0))
    edge.prefill.finish(engine_call)
    await ends_well(call)


async def test_a_dead_engine_is_unavailable_once_the_command_has_come(edge: Edge) -> None:
    edge.prefill.is_alive = False
    call: Call = edge.channel.stream_stream("/baton.v1.Prefill/Handoff")()
    await edge.channel.unary_unary("/baton.v1.Prefill/GetLoad")(b"")  # so the Handoff call has arrived too
    assert not call.done()
    await call.write(encode_prefill_batch(FINGERPRINT, (row(),)))
    assert (await status_of(call)).code() == grpc.StatusCode.UNAVAILABLE
    assert edge.prefill.commands.all() == []
    assert edge.servicer.num_calls == 0


async def test_calls_of_an_engine_that_dies_are_unavailable(edge: Edge) -> None:
    call = await edge.open()
    await edge.opened()
    edge.prefill.is_alive = False
    edge.servicer.engine_died(RuntimeError("out of memory"))
    status = await status_of(call)
    info = error_info(status)
    assert status.code() == grpc.StatusCode.UNAVAILABLE
    assert info is not None
    assert info.reason == "ENGINE_LOST"
    assert "out of memory" in (status.details() or "")


# ---- the other calls ------------------------------------------------------------------------------------------------


async def test_the_fingerprint_is_told_with_the_instance(edge: Edge) -> None:
    response = await prefill_pb2_grpc.PrefillStub(edge.channel).GetFingerprint(prefill_pb2.GetFingerprintRequest())
    assert decode_fingerprint(response.fingerprint) == FINGERPRINT
    assert response.instance_id == "instance"


async def test_the_load_is_the_engines(edge: Edge) -> None:
    edge.prefill.load = EngineLoad(
        rows=PoolCounts(total=8, free=5, running=3),
        slots=PoolCounts(total=90, free=50, transferring=30, quarantined=10),
        num_queued=4,
        num_running=2,
        num_steps=11,
        unsent_bytes=77,
        num_uncomputed_tokens=300,
        num_computed_tokens=700,
        prefixes=PrefixCounts(num_evicted=13),
    )
    load = await prefill_pb2_grpc.PrefillStub(edge.channel).GetLoad(prefill_pb2.GetPrefillLoadRequest())
    assert (load.instance_id, load.num_queued, load.num_computing, load.num_steps) == ("instance", 4, 2, 11)
    assert (load.rows.total, load.rows.free, load.rows.running) == (8, 5, 3)
    assert (load.slots.transferring, load.slots.quarantined, load.unsent_bytes) == (30, 10, 77)
    assert (load.num_uncomputed_tokens, load.num_evicted_tokens, load.max_cached_tokens) == (300, 13, 90)
    assert load.num_computed_tokens == 700


@pytest.fixture
def health(edge: Edge) -> Callable[[str], Awaitable[int]]:
    check = edge.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )

    async def status(service: str) -> int:
        return (await check(health_pb2.HealthCheckRequest(service=service))).status

    return status


async def test_health_tells_alive_from_ready(edge: Edge, health: Callable[[str], Awaitable[int]]) -> None:
    response = health_pb2.HealthCheckResponse
    assert await health("") == response.SERVING
    assert await health(PREFILL_SERVICE) == response.NOT_SERVING
    await edge.server.set_ready(True)
    assert await health(PREFILL_SERVICE) == response.SERVING
    await edge.server.set_ready(False)
    assert (await health(""), await health(PREFILL_SERVICE)) == (response.SERVING, response.NOT_SERVING)


async def test_reflection_lists_the_services(edge: Edge) -> None:
    def services() -> set[str]:
        with grpc.insecure_channel(edge.address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {PREFILL_SERVICE, "grpc.health.v1.Health"} <= await asyncio.to_thread(services)
