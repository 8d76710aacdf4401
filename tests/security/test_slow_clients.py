"""Tests of clients that open calls and send nothing, or do not read: what each may take is limited, and all others are
served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import inference_pb2, prefill_pb2, prefill_pb2_grpc
from common.rpc.server_bounds import MAX_REQUEST_FIELDS
from common.rpc.tls import channel_credentials, server_credentials
from common.service.server import HealthServicer, ServerLimits
from common.telemetry.stats import Timings
from common.wire.codec_commands import encode_prefill_batch
from decode_service.messages import Abort, Finished, FinishReason, Submit
from prefill_service.edge.servicer import HandoffLimits
from tests.decode_edge.edge_under_test import SERVICE, AloneContext, Edge, error_of, running_edge, tokens_of
from tests.decode_edge.fake_engine import BOUND_S
from tests.handoff.samples import FINGERPRINT, prebuilt, row
from tests.security.certificates import Authority
from tests.security.raw_http2 import DATA, HEADERS, PREFACE, WINDOW_UPDATE, RawHttp2, frame, grpc_message, headers
from tests.support.prefill_edge import PrefillEdge, running_prefill_edge
from tests.support.services_here import until

HANDOFF, PREFILL_LOAD = "/baton.v1.Prefill/Handoff", "/baton.v1.Prefill/GetLoad"
GENERATE, GET_LOAD, MODEL_INFO = f"/{SERVICE}/Generate", f"/{SERVICE}/GetLoad", f"/{SERVICE}/GetModelInfo"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SHORT_S = 1.0
"""A time-out in seconds that no well-behaved client meets, except in a handshake, which its channel tries again."""
LONG_S = 600.0
"""A time-out in seconds that no test reaches, unless it skips the event loop's time."""
NUM_STREAMS = 3
REQUEST = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3])).SerializeToString()


Connect = Callable[..., Awaitable[RawHttp2]]


@asynccontextmanager
async def running(*, client_stall_timeout_s: float = BOUND_S, **limits: float) -> AsyncIterator[Edge]:
    server_limits = ServerLimits(
        max_message_bytes=1 << 16, max_streams=NUM_STREAMS, **{"request_timeout_s": LONG_S, **limits}
    )
    async with running_edge([], limits=server_limits, client_stall_timeout_s=client_stall_timeout_s) as edge:
        yield edge
        edge.router.on_death(RuntimeError("the test is over"))
        await edge.live_requests.wait_idle()


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with running() as edge:
        yield edge


@pytest.fixture
async def edge_that_closes_idle() -> AsyncIterator[Edge]:
    """An edge that closes idle connections. One test has it to itself, because such a close may hit another test's
    call.
    """
    async with running(idle_timeout_s=SHORT_S) as edge:
        yield edge


@pytest.fixture
async def edge_that_awaits_no_handshake() -> AsyncIterator[Edge]:
    async with running(handshake_timeout_s=SHORT_S) as edge:
        yield edge


@pytest.fixture
async def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that moves the event loop's time forward by a part of LONG_S."""
    loop = asyncio.get_running_loop()
    time, skipped_s = loop.time, 0.0

    def skip() -> None:
        nonlocal skipped_s
        skipped_s += LONG_S / 4

    monkeypatch.setattr(loop, "time", lambda: time() + skipped_s)
    return skip


@pytest.fixture
async def connect(edge: Edge) -> AsyncIterator[Connect]:
    """A function that opens raw connections, to the edge unless an address is given."""
    made: list[RawHttp2] = []

    async def connect(*, address: str = edge.address, window: int = 65535) -> RawHttp2:
        made.append(await RawHttp2.connect(address, window=window))
        return made[-1]

    yield connect
    for client in made:
        await client.close()


async def wait_until_closed(address: str, sent: bytes) -> None:
    """Sends these bytes on a new connection, and waits until the server closes it."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(sent)
    async with asyncio.timeout(BOUND_S):
        while await reader.read(1024):
            pass
    writer.close()


async def until_in_time(holds: Callable[[], bool], skip: Callable[[], None]) -> None:
    """Waits until `holds` is True, which needs LONG_S. The event loop's time passes meanwhile."""
    give_up_s = monotonic() + BOUND_S  # the loop's own time is skipped
    while not holds():
        assert monotonic() < give_up_s
        skip()
        await asyncio.sleep(0.01)


async def ended(slow: RawHttp2, streams: Sequence[int], skip: Callable[[], None]) -> None:
    """Waits for the end of streams whose time is up after LONG_S."""
    await until_in_time(lambda: all(map(slow.has_ended, streams)), skip)


async def is_served(edge: Edge) -> None:
    """Asserts that a whole generation, a small call and a health check succeed."""
    await asyncio.wait_for(edge.channel.channel_ready(), BOUND_S)
    num_before = len(edge.engine.of_type(Submit))
    call = edge.generate(timeout=BOUND_S)
    request_id = (await edge.engine.submitted(num_before + 1)).request_id
    edge.deliver(tokens_of(request_id, (97,)), Finished(request_id, FinishReason.LENGTH, 3, 1, Timings()))
    assert [event.WhichOneof("event") async for event in call] == ["started", "delta", "finished"]
    await edge.stub.GetLoad(inference_pb2.GetInferenceLoadRequest(), timeout=BOUND_S)
    checked = await health_pb2_grpc.HealthStub(edge.channel).Check(
        health_pb2.HealthCheckRequest(service=SERVICE), timeout=BOUND_S
    )
    assert checked.status == health_pb2.HealthCheckResponse.SERVING


async def hands_over(prefill: PrefillEdge, channel: grpc.aio.Channel) -> None:
    """Asserts that a whole handoff, the first of this edge, succeeds, and a small call too."""
    call: Any = channel.stream_stream(HANDOFF)(timeout=BOUND_S)
    await call.write(encode_prefill_batch(FINGERPRINT, (row(),)))
    call_id = (await asyncio.to_thread(prefill.engine.opened))[0].call_id
    prefill.engine.emit(call_id, prebuilt(0))
    prefill.engine.finish(call_id)
    assert len([frame async for frame in call]) == 2, "Accepted and the row"
    await prefill_pb2_grpc.PrefillStub(channel).GetLoad(prefill_pb2.GetPrefillLoadRequest(), timeout=BOUND_S)


def num_handlers() -> int:
    """Returns the number of calls that the server is handling. Each is an asyncio task."""
    return sum("_handle_exceptions" in repr(task) for task in asyncio.all_tasks())


def num_streams() -> int:
    """Returns the number of calls that gRPC itself keeps open."""
    return sum("_schedule_rpc_coro" in repr(task) for task in asyncio.all_tasks())


# ---- clients that do not send ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [GENERATE, GET_LOAD, CHECK, WATCH])
async def test_a_call_whose_request_does_not_come_ends(
    edge: Edge, connect: Connect, skip: Callable[[], None], method: str
) -> None:
    """One call's request does not come at all, and another's is incomplete."""
    slow = await connect()
    silent, partial = slow.open(method), slow.open(method)
    slow.send(frame(DATA, 0, partial, grpc_message(REQUEST)[:-1]))

    await ended(slow, (silent, partial), skip)

    for stream in (silent, partial):
        assert b"did not arrive within" in b"".join(slow.of(stream, HEADERS))
    assert not edge.engine.commands
    await until(lambda: num_handlers() == 0)
    await is_served(edge)


async def test_streams_beyond_the_limit_are_refused_and_the_small_calls_answered(
    edge: Edge, connect: Connect, skip: Callable[[], None]
) -> None:
    """A call whose request has not arrived counts as a stream too, and its end makes room for another. All connections
    of a machine count as one client.
    """
    slow = await connect()
    silent = [slow.open(GENERATE) for _ in range(NUM_STREAMS)]
    await until(lambda: num_handlers() == NUM_STREAMS)

    status, reason, _ = await error_of(edge.generate(timeout=BOUND_S))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert not any(map(slow.has_ended, silent))
    await edge.stub.GetLoad(inference_pb2.GetInferenceLoadRequest(), timeout=BOUND_S)
    await edge.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=BOUND_S)
    check = health_pb2_grpc.HealthStub(edge.channel).Check
    await check(health_pb2.HealthCheckRequest(service=""), timeout=BOUND_S)
    watch = health_pb2_grpc.HealthStub(edge.channel).Watch(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()

    await ended(slow, silent, skip)
    await is_served(edge)


@pytest.mark.parametrize("sent", [b"", PREFACE[:10], b"GET / HTTP/1.1\r\n\r\n", bytes(64)], ids=repr)
async def test_a_connection_that_does_not_become_http2_is_closed(
    edge_that_awaits_no_handshake: Edge, sent: bytes
) -> None:
    await wait_until_closed(edge_that_awaits_no_handshake.address, sent)
    await is_served(edge_that_awaits_no_handshake)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
async def test_a_tls_handshake_that_does_not_end_is_closed(tmp_path: Path, sent: bytes) -> None:
    authority = Authority(tmp_path, "site")
    files = authority.issue("server")
    async with (
        running_prefill_edge(
            server_limits=ServerLimits(handshake_timeout_s=SHORT_S),
            credentials=server_credentials(files.certificate, files.key, None),
        ) as prefill,
        grpc.aio.secure_channel(prefill.address, channel_credentials(authority.ca, None, None)) as channel,
    ):
        await wait_until_closed(prefill.address, sent)
        await asyncio.wait_for(channel.channel_ready(), BOUND_S)
        await hands_over(prefill, channel)


async def test_a_connection_without_calls_is_closed_and_its_client_connects_again(
    edge_that_closes_idle: Edge, connect: Connect
) -> None:
    await is_served(edge_that_closes_idle)
    idle = [await connect(address=edge_that_closes_idle.address) for _ in range(20)]
    half_a_header = await connect(address=edge_that_closes_idle.address)
    half_a_header.send(frame(HEADERS, 0, 1, headers(GENERATE)[:20]))

    await asyncio.wait_for(asyncio.gather(*(each.is_closed.wait() for each in (*idle, half_a_header))), BOUND_S)

    await is_served(edge_that_closes_idle)


async def test_connections_beyond_the_limit_are_closed_and_the_others_served(connect: Connect) -> None:
    async with running(max_connections=2) as edge:
        await is_served(edge)  # its own connection stays open
        other, third = [await connect(address=edge.address) for _ in range(2)]
        async with asyncio.timeout(BOUND_S):
            await third.is_closed.wait()
        await is_served(edge)
        assert not other.is_closed.is_set()


async def test_the_head_of_an_answer_comes_before_the_request(connect: Connect) -> None:
    """A client whose request takes long to send must not take the service for one that hangs."""
    client = await connect()
    streams = [client.open(method) for method in (GET_LOAD, GENERATE, CHECK)]
    await until(lambda: all(client.of(stream, HEADERS) for stream in streams))
    assert not any(client.has_ended(stream) for stream in streams)


# ---- clients that do not read ---------------------------------------------------------------------------------------


async def test_a_generation_that_nobody_reads_ends_and_holds_nothing(
    connect: Connect, skip: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The client's flow-control window lets nothing through: the first event is still being written when the generation
    is given up. A client that reads again gets the event and the status.
    """
    async with running(client_stall_timeout_s=LONG_S) as edge:
        stalled = await connect(window=0, address=edge.address)
        streams = [stalled.open(GENERATE, REQUEST) for _ in range(NUM_STREAMS)]
        await edge.engine.submitted(NUM_STREAMS)

        await until_in_time(lambda: len(edge.engine.of_type(Abort)) == NUM_STREAMS, skip)
        await until(lambda: num_handlers() == 0)

        assert len(edge.live_requests) == 0
        assert not any(stalled.of(stream, DATA) for stream in streams)
        assert not caplog.records
        await is_served(edge)
        await read_to_the_end(stalled, streams)
        await stalled.close()
        await until(lambda: num_streams() == 0)


async def read_to_the_end(stalled: RawHttp2, streams: Sequence[int]) -> None:
    """Takes what the server has sent on these streams, which waits for room in their windows."""
    for stream in streams:
        stalled.send(frame(WINDOW_UPDATE, 0, stream, (1 << 16).to_bytes(4, "big")))
    await until(lambda: all(stalled.has_ended(stream) for stream in streams))


async def test_a_single_answer_that_nobody_reads_is_given_up(
    edge: Edge, connect: Connect, skip: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A client that reads after all gets the answer, and the status that says why the call counts as failed."""
    stalled = await connect(window=0)
    checked = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    streams = [stalled.open(method, b"") for method in (GET_LOAD, MODEL_INFO)] + [stalled.open(CHECK, checked)]
    await until(lambda: all(stalled.of(stream, HEADERS) for stream in streams))

    await until_in_time(lambda: num_handlers() == 0, skip)

    assert not any(stalled.of(stream, DATA) for stream in streams)
    assert not caplog.records
    await is_served(edge)
    await read_to_the_end(stalled, streams)
    assert all(b"took no answer" in b"".join(stalled.of(stream, HEADERS)) for stream in streams)


async def test_what_a_slow_reader_has_not_taken_is_kept_once(edge: Edge, connect: Connect) -> None:
    """A client that reads 16 bytes at a time gets few, large events, so the server keeps no queue of events for it."""
    slow = await connect(window=16)
    stream = slow.open(GENERATE, REQUEST)
    request_id = (await edge.engine.submitted()).request_id
    for _ in range(40):
        edge.deliver(tokens_of(request_id, (97,)))
        await asyncio.sleep(0)  # the edge takes each by itself
    edge.deliver(Finished(request_id, FinishReason.LENGTH, 3, 40, Timings()))

    for _ in range(200):
        slow.send(frame(WINDOW_UPDATE, 0, stream, (16).to_bytes(4, "big")))
    await until(lambda: slow.has_ended(stream))

    events = messages_in(b"".join(slow.of(stream, DATA)))
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert sum(len(event.delta.token_ids) for event in events) == 40
    assert len(events) <= 5, "merged while they could not be sent"


def messages_in(data: bytes) -> list[inference_pb2.GenerateEvent]:
    events = []
    while data:
        size = int.from_bytes(data[1:5], "big")
        events.append(inference_pb2.GenerateEvent.FromString(data[5 : 5 + size]))
        data = data[5 + size :]
    return events


async def test_a_health_watcher_that_reads_nothing_delays_nobody_and_is_dropped(
    edge: Edge, connect: Connect, skip: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Readiness still changes, and a shutdown, which waits for such a change, still goes on."""
    stalled = await connect(window=0)
    stalled.open(WATCH, health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString())
    await until(lambda: num_handlers() == 1)

    async with asyncio.timeout(BOUND_S):
        for is_ready in (False, True, False, True):
            await edge.server.set_ready(is_ready)
            watch = health_pb2_grpc.HealthStub(edge.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            await watch.read()
            watch.cancel()
    await is_served(edge)
    await until_in_time(lambda: num_handlers() == 0, skip)
    assert not caplog.records


async def test_a_hosts_watches_are_bounded_and_one_connections_watches_keep_no_other_out() -> None:
    """A further watch ends the oldest on the connection with most. Streams have room beside them."""
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        running(max_watches_per_client=NUM_STREAMS) as edge,
        grpc.aio.insecure_channel(edge.address, options=alone) as other,
        grpc.aio.insecure_channel(edge.address, options=alone) as third,
    ):

        async def watch(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[Any, Any]:
            stub = health_pb2_grpc.HealthStub(channel)
            call: grpc.aio.UnaryStreamCall[Any, Any] = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
            return call

        before = await watch(third)
        first, *rest = [await watch(edge.channel) for _ in range(NUM_STREAMS - 1)]
        others = [before, await watch(other)]

        assert await first.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        refused = health_pb2_grpc.HealthStub(edge.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert await refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, "its connection has most"
        await is_served(edge)
        await edge.server.set_ready(False)
        for each in (*rest, *others):
            assert (await each.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            each.cancel()
        await until(lambda: num_handlers() == 0)


async def test_the_hosts_of_an_ipv6_network_share_the_bound_of_watches() -> None:
    health = HealthServicer(max_watches_per_client=1)

    def watch(host: int) -> asyncio.Task[None]:
        context: Any = AloneContext(remaining_s=BOUND_S, peer=f"ipv6:%5B2001:db8::{host}%5D:5")
        return asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(), context))

    first = watch(1)
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AbortError):
        await asyncio.wait_for(watch(2), BOUND_S)
    first.cancel()


# ---- handoffs -------------------------------------------------------------------------------------------------------


async def test_a_handoff_that_nobody_reads_is_closed(edge: Edge, connect: Connect) -> None:
    """The receiver takes nothing, not even Accepted. The engine drops the rows of such calls, and calls that are read
    continue.
    """
    async with running_prefill_edge(limits=HandoffLimits(stall_timeout_s=SHORT_S)) as prefill:
        stalled = await connect(address=prefill.address, window=0)
        for _ in range(NUM_STREAMS):
            stalled.open(HANDOFF, encode_prefill_batch(FINGERPRINT, (row(),)), ends=False)
        calls = await asyncio.to_thread(prefill.engine.opened, NUM_STREAMS)

        for call in calls:
            await asyncio.to_thread(prefill.engine.closed, call.call_id)
        await until(lambda: num_handlers() == 0)

        assert prefill.servicer.num_calls == 0


async def test_a_handoff_whose_batch_comes_too_slowly_is_refused(edge: Edge, connect: Connect) -> None:
    async with running_prefill_edge(limits=HandoffLimits(first_command_timeout_s=SHORT_S)) as prefill:
        slow = await connect(address=prefill.address)
        stream = slow.open(HANDOFF)
        for byte in grpc_message(encode_prefill_batch(FINGERPRINT, (row(),)))[:8]:
            slow.send(frame(DATA, 0, stream, bytes((byte,))))
        await until(lambda: slow.has_ended(stream))
        assert b"did not arrive within" in b"".join(slow.of(stream, HEADERS))
        assert prefill.engine.commands.all() == []


async def test_handoffs_beyond_the_limit_of_streams_are_refused_and_the_small_calls_answered(connect: Connect) -> None:
    """A call whose batch of rows has not arrived counts too."""
    async with (
        running_prefill_edge(server_limits=ServerLimits(max_streams=NUM_STREAMS)) as prefill,
        grpc.aio.insecure_channel(prefill.address) as channel,
    ):
        slow = await connect(address=prefill.address)
        for _ in range(NUM_STREAMS):
            slow.open(HANDOFF)
        await until(lambda: num_handlers() == NUM_STREAMS)

        status, reason, _ = await error_of(channel.stream_stream(HANDOFF)(timeout=BOUND_S))
        assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        stub = prefill_pb2_grpc.PrefillStub(channel)
        await stub.GetLoad(prefill_pb2.GetPrefillLoadRequest(), timeout=BOUND_S)
        await stub.GetFingerprint(prefill_pb2.GetFingerprintRequest(), timeout=BOUND_S)
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(health_pb2.HealthCheckRequest(service=""), timeout=BOUND_S)

        await slow.close()
        await until(lambda: num_handlers() == 0)
        await hands_over(prefill, channel)


# ---- clients that send too much -------------------------------------------------------------------------------------


async def test_a_request_beyond_the_size_limit_fails_alone(edge: Edge) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await edge.generate(text="x" * (1 << 17), timeout=BOUND_S).read()
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await is_served(edge)


async def codes_by_metadata(address: str, method: str) -> list[grpc.StatusCode]:
    codes = []
    for num_bytes in (4 << 10, 17 << 10, 200 << 10):
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(method)(b"", metadata=(("noise", "x" * num_bytes),), timeout=BOUND_S)
            codes.append(await call.code())
    return codes


@pytest.mark.parametrize("service", ["decode", "prefill"])
async def test_metadata_beyond_the_size_limit_fails_alone(edge: Edge, service: str) -> None:
    """Only the call with the large metadata fails, although gRPC may also close the connection on which it came."""
    async with running_prefill_edge() as prefill, grpc.aio.insecure_channel(prefill.address) as channel:
        target = (edge.address, GET_LOAD) if service == "decode" else (prefill.address, PREFILL_LOAD)
        codes = await codes_by_metadata(*target)
        assert [code is grpc.StatusCode.OK for code in codes] == [True, False, False], codes
        await is_served(edge)
        await hands_over(prefill, channel)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([inference_pb2.ChatMessage(role="é" * 20_000)], "chat.messages[0].role"),
        ([inference_pb2.ChatMessage()] * (MAX_REQUEST_FIELDS + 1), "chat.messages"),  # two million fit into a request
    ],
    ids=["long", "many"],
)
async def test_an_error_about_a_long_field_arrives_with_its_code_and_field(
    edge: Edge, messages: Sequence[inference_pb2.ChatMessage], field: str
) -> None:
    refused = await error_of(edge.generate(chat=inference_pb2.Chat(messages=messages)))
    assert refused == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", {"field": field})


async def test_a_request_that_cannot_be_parsed_is_refused_by_name(edge: Edge) -> None:
    for method in (GENERATE, GET_LOAD, CHECK):
        call = edge.channel.unary_stream(method)(b"\x12\x02\xff\xfe\xff")
        refused = await error_of(call)
        assert refused == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", {"field": "request"})
