"""Fuzz targets that receive a peer's bytes over the network: the edges of both services, and the decode service when
a replica answers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from hypothesis import strategies as st

from baton.client.generation import EventOrder
from baton.errors import error_from_rpc
from baton.events import Finished
from baton.v1 import inference_pb2, prefill_pb2
from common.rpc.grpc_options import channel_options
from common.wire.framing import unseal
from decode_service.handoff.transport import HandoffTimeouts
from tests.fuzz.engine_target import fingerprint_of
from tests.fuzz.pure_targets import MAX_STATUS_BYTES, checksummed
from tests.fuzz.services import (
    BOUND_S,
    Decode,
    Prefill,
    WatchedLoop,
    loop_under_watch,
    start_decode,
    start_prefill,
    stop_decode,
    stop_prefill,
    tiny_target,
    wait_until,
)
from tests.fuzz.target import Run, Target, join, split
from tests.fuzz.wire_strategies import hostile_messages
from tests.handoff.raw_replica import RawReplica

FAST = HandoffTimeouts(
    connect_timeout_s=BOUND_S, accept_timeout_s=BOUND_S, progress_timeout_s=BOUND_S, poll_interval_s=0.02
)
GENERATE, HANDOFF = "/baton.v1.Inference/Generate", "/baton.v1.Prefill/Handoff"
LONGEST_STREAM = 64
"""The most events that a fuzzed client reads before it leaves."""
_WRITE_FAILED = "Internal error from Core"
"""gRPC's text when a server writes to a call that has ended meanwhile. The client then does not get the server's own
status.
"""

GENERATE_REFUSALS = {
    (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED"),
    (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
}
HANDOFF_REFUSALS = {
    (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH"),
}
BROKEN_REPLICA = {
    (grpc.StatusCode.UNAVAILABLE, "NO_PREFILL"),
    (grpc.StatusCode.INTERNAL, "ENGINE_FAULT"),
    (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH"),
    (grpc.StatusCode.CANCELLED, "CANCELLED"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE"),
}


def assert_refused(failure: grpc.aio.AioRpcError, allowed: set[tuple[grpc.StatusCode, str]]) -> None:
    """Asserts that a call failed with a documented code and reason, and names the field where one is promised."""
    error = error_from_rpc(failure)
    assert (failure.code(), error.reason) in allowed, f"{failure.code()} {error.reason}: {failure.details()!r}"
    assert len((failure.details() or "").encode()) <= MAX_STATUS_BYTES
    if failure.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
        assert error.field, failure.details()


async def generate(
    channel: grpc.aio.Channel, request: bytes, num_events: int, allowed: set[tuple[grpc.StatusCode, str]]
) -> None:
    """Makes one Generate call. Leaves it after `num_events` events, or else checks that its events are in order and
    that it ends once.
    """
    call: Any = channel.unary_stream(GENERATE, response_deserializer=inference_pb2.GenerateEvent.FromString)(request)
    order = EventOrder()
    try:
        async with asyncio.timeout(BOUND_S):
            for _ in range(num_events):
                message = await call.read()
                if message is grpc.aio.EOF:
                    order.end()
                    return
                if isinstance(order.accept(message), Finished):
                    num_events += 1
    except grpc.aio.AioRpcError as failure:
        assert_refused(failure, allowed)
    finally:
        call.cancel()


def settled(loop: WatchedLoop, *services: Prefill | Decode) -> None:
    """Waits until the services hold nothing. Asserts that the engines run and that nothing failed in the background."""
    wait_until(
        lambda: all(service.holds_nothing() for service in services),
        lambda: [service.thread.inbox.load for service in services],
    )
    assert all(service.thread.is_alive for service in services), "an engine died"
    faults, loop.faults[:] = list(loop.faults), []
    assert not faults, faults


@contextmanager
def decode_edge() -> Iterator[Run]:
    """Yields the target for Generate. An input's first byte is the number of events to read before leaving (0 reads
    all); the rest is a request.
    """
    with tiny_target() as (model, tokenizer), loop_under_watch() as loop:
        prefill = loop.run(start_prefill(model))
        decode = loop.run(start_decode(model, tokenizer, prefill.address, FAST))
        wait_until(lambda: decode.replicas.can_serve, decode.replicas.states)
        channel = loop.run(_connect(decode.address))

        def run(data: bytes) -> None:
            num_events = data[0] % LONGEST_STREAM if data else 0
            loop.run(generate(channel, data[1:], num_events or LONGEST_STREAM, GENERATE_REFUSALS))
            settled(loop, decode, prefill)

        try:
            yield run
        finally:
            loop.run(channel.close())
            loop.run(stop_decode(decode))
            loop.run(stop_prefill(prefill))


@contextmanager
def prefill_edge() -> Iterator[Run]:
    """Yields the target for Handoff calls.

    The low bits of an input's first byte are the number of frames to read before leaving; 0 reads all. The top bit
    keeps the client's side of the call open, and the next bit leaves versions and checksums as they are. The rest of
    the input is the commands.
    """
    with tiny_target() as (model, _), loop_under_watch() as loop:
        service = loop.run(start_prefill(model))
        channel = loop.run(_connect(service.address))

        def run(data: bytes) -> None:
            control = data[0] if data else 0
            commands = split(data[1:])
            if not control & 64:
                commands = [checksummed(prefill_pb2.HandoffCommand, command) for command in commands]
            try:
                loop.run(_handoff(channel, commands, num_frames=control & 63 or 10_000, half_closes=control < 128))
            except grpc.aio.AioRpcError as failure:
                if failure.details() != _WRITE_FAILED:
                    assert_refused(failure, HANDOFF_REFUSALS)
            settled(loop, service)

        try:
            yield run
        finally:
            loop.run(channel.close())
            loop.run(stop_prefill(service))


async def _handoff(channel: grpc.aio.Channel, commands: Sequence[bytes], *, num_frames: int, half_closes: bool) -> None:
    """Makes one Handoff call. If it ends without an error, each of its rows must have ended exactly once."""
    call: Any = channel.stream_stream(HANDOFF)()
    rows: list[int] = []
    try:
        async with asyncio.timeout(BOUND_S):
            try:
                for command in commands:
                    await call.write(command)
                if half_closes or not commands:
                    await call.done_writing()
            except asyncio.InvalidStateError:
                pass  # the call has ended already; reading tells how
            for _ in range(num_frames):
                data = await call.read()
                if data is grpc.aio.EOF:
                    break
                rows.extend(_ended_rows(data))
            else:
                return
    finally:
        call.cancel()
    batch = prefill_pb2.HandoffCommand.FromString(commands[0]).prefill_batch
    assert sorted(rows) == list(range(len(batch.rows)))


def _ended_rows(data: bytes) -> list[int]:
    frame, _ = unseal(prefill_pb2.HandoffFrame, data, most_fields=1024)
    if frame.WhichOneof("frame") == "row_failed":
        return [frame.row_failed.row]
    return list(frame.prebuilt_batch.rows)


@contextmanager
def replica() -> Iterator[Run]:
    """Yields the target for answers of a prefill replica to the decode service.

    If an input's first byte is odd, the frames keep their versions and checksums. The answers to health checks,
    GetFingerprint and GetLoad follow, where an empty one stands for a correct answer, and then the frames of each call.
    """
    with tiny_target() as (model, tokenizer), loop_under_watch() as loop:
        raw = RawReplica(fingerprint=fingerprint_of(model, None))
        loop.run(raw.start())
        timeouts = HandoffTimeouts(
            connect_timeout_s=2.0, accept_timeout_s=2.0, progress_timeout_s=2.0, poll_interval_s=0.01
        )
        decode = loop.run(start_decode(model, tokenizer, f"127.0.0.1:{raw.port}", timeouts, prefill_timeout_s=0.1))
        channel = loop.run(_connect(decode.address))
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7])).SerializeToString()

        def run(data: bytes) -> None:
            control, messages = data[0] if data else 0, split(data[1:])
            health, fingerprint, load, *frames = [*messages, b"", b"", b""][: max(3, len(messages))]
            if not control & 1:
                frames = [checksummed(prefill_pb2.HandoffFrame, frame) for frame in frames]
            raw.answers = {"Check": health, "GetFingerprint": fingerprint, "GetLoad": load}
            raw.instance_id = str(raw.num_looks)  # makes the decode service ask for the fingerprint again
            raw.frames = frames
            _looked_at_twice(raw)
            loop.run(generate(channel, request, LONGEST_STREAM, BROKEN_REPLICA))
            loop.faults[:] = [fault for fault in loop.faults if "cannot serve: " not in fault]  # this error is expected
            settled(loop, decode)

        try:
            yield run
        finally:
            loop.run(channel.close())
            loop.run(stop_decode(decode))
            loop.run(raw.stop())


def _looked_at_twice(raw: RawReplica) -> None:
    """Waits until the decode service has polled the replica entirely after its answers changed. That is certain when a
    third poll has begun.
    """
    num_before = raw.num_looks
    wait_until(lambda: raw.num_looks >= num_before + 3, lambda: raw.num_looks)


async def _connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options())


def _generate_inputs(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    requests = hostile_messages(inference_pb2.GenerateRequest.DESCRIPTOR, tuple(seed[1:] for seed in seeds))
    return st.tuples(st.sampled_from((0, 0, 1, 2, 5)), requests).map(lambda drawn: bytes(drawn[:1]) + drawn[1])


def _command_inputs(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    commands = tuple({command: None for seed in seeds for command in split(seed[1:])})
    hostile = hostile_messages(prefill_pb2.HandoffCommand.DESCRIPTOR, commands)
    sequence = st.tuples(st.sampled_from(commands) | hostile, st.lists(st.sampled_from(commands) | hostile, max_size=3))
    return st.tuples(st.sampled_from((0, 0, 1, 2, 4, 64, 129)), sequence).map(
        lambda drawn: bytes(drawn[:1]) + join([drawn[1][0], *drawn[1][1]])
    )


def _replica_inputs(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    frames = tuple({frame: None for seed in seeds for frame in split(seed[1:])[3:]})
    hostile = hostile_messages(prefill_pb2.HandoffFrame.DESCRIPTOR, frames)
    answers = st.one_of(
        st.just([b"", b"", b""]),
        st.just([b"", b"", b""]),
        st.tuples(
            st.sampled_from((b"", b"\x08\x02", b"\x08\x63", b"\xff")),
            st.just(b"") | hostile_messages(prefill_pb2.GetFingerprintResponse.DESCRIPTOR, (b"",)),
            st.just(b"") | hostile_messages(prefill_pb2.GetPrefillLoadResponse.DESCRIPTOR, (b"",)),
        ).map(list),
    )
    return st.tuples(
        st.sampled_from((0, 0, 0, 1)), answers, st.lists(st.sampled_from(frames) | hostile, max_size=4)
    ).map(lambda drawn: bytes(drawn[:1]) + join([*drawn[1], *drawn[2]]))


EDGE_TARGETS = (
    Target(name="decode_edge", inputs=_generate_inputs, open=decode_edge, is_pure=False),
    Target(name="prefill_edge", inputs=_command_inputs, open=prefill_edge, is_pure=False),
    Target(name="replica", inputs=_replica_inputs, open=replica, is_pure=False),
)
