"""Tests of shared memory between a prefill edge and a transport on one host: which calls get tickets, and when loans
end.
"""

from __future__ import annotations

import errno
import gc
import itertools
import secrets
import socket
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from baton.v1 import prefill_pb2
from common.errors import EngineFault, PrefillUnavailable
from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_kv import MAX_LENT_BYTES, SharedKv
from common.kv.shared_pool import DIRECTORY, MappedPool, PoolUnusable
from common.rpc.messages import ProtocolError
from common.wire.codec_commands import decode_command, encode_release_segments
from common.wire.codec_frames import FrameCodec
from common.wire.framing import seal
from common.wire.handoff import KvSegment
from decode_service.handoff import grpc_replica
from decode_service.messages import BreakCall, CancelHandoffRows, SegmentsLanded, StartHandoff
from prefill_service.messages import BytesSent, SegmentsReturned
from tests.handoff.homes import FAST, GrpcHome, LentSegments, read
from tests.handoff.samples import (
    FINGERPRINT,
    ROOMY_BUDGET_BYTES,
    SEGMENT_BYTES,
    SEGMENT_TOKENS,
    TARGET,
    failed,
    prebuilt,
    row,
    segment,
)
from tests.handoff.scripted_prefill import RecordingDecode, ScriptedPrefill
from tests.support.running_pair import wait_until
from tests.wire.strategies import VOCAB_SIZE

CODEC = FrameCodec(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE)


class Pair(GrpcHome):
    """Both edges between scripted engines. The test fills the pool, and the decode side releases nothing by itself."""

    def __init__(self, stall_timeout_s: float = 60.0) -> None:
        self.stall_timeout_s = stall_timeout_s
        self.lent = LentSegments(FINGERPRINT.layer_groups, num_slots=8 * SEGMENT_TOKENS)
        self.shared_pool = self.lent.pool
        self.prefill, self.decode = ScriptedPrefill(), RecordingDecode()
        super().__init__(self.prefill, self.decode, FINGERPRINT, ROOMY_BUDGET_BYTES)

    def start(self, num_rows: int = 1) -> str:
        rows = tuple(row(str(number)) for number in range(num_rows))
        self.transport.start(StartHandoff("call", self.address, rows))
        return self.prefill.opened()[0].call_id

    def shares_memory(self) -> bool:
        return self.prefill.opened()[0].shares_memory

    def returned(self, call: str, *segments: KvSegment) -> None:
        """Waits until the prefill engine has been told that these segments were returned, in this order."""
        wanted = [number(segment) for segment in segments]

        def holds(commands: list[object]) -> bool:
            found = [c.numbers for c in commands if isinstance(c, SegmentsReturned) and c.call_id == call]
            return [each for numbers in found for each in numbers] == wanted

        self.prefill.commands.wait_until(holds)  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        self.lent.pool.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def mapped(pair: Pair) -> MappedPool:
    return MappedPool(pair.lent.pool.name, groups=FINGERPRINT.layer_groups)


def number(segment: KvSegment) -> int:
    assert segment.shared is not None
    return segment.shared.ticket.number


def test_a_ticket_leads_to_the_writers_own_memory(pair: Pair) -> None:
    call = pair.start()
    assert pair.shares_memory()
    frame = pair.lent.lend(segment(0, 3))
    pair.prefill.emit(call, frame)
    (arrived,) = pair.decode.frames("call", 1)
    assert isinstance(arrived, KvSegment) and isinstance(arrived.shared, SharedKv)
    assert isinstance(frame.shared, SharedKv)
    assert len(arrived.payload) == 0 and arrived.num_bytes == SEGMENT_BYTES
    assert read(arrived.shared) == segment(0, 3).payload
    frame.shared.layers[:] = 9
    assert set(read(arrived.shared)) == {9}, "no byte of it travelled"


def test_segments_come_back_when_they_landed_and_only_then_the_call_ends(pair: Pair) -> None:
    call = pair.start()
    first, second = pair.lent.lend(segment(0, 0)), pair.lent.lend(segment(0, 1))
    pair.prefill.emit(call, first, second, prebuilt(0))
    pair.prefill.finish(call)
    pair.decode.frames("call", 3)
    pair.transport.landed(SegmentsLanded("call", SEGMENT_BYTES, (number(first),)))
    pair.returned(call, first)
    assert pair.decode.num_ends("call") == 0, "a segment is out"
    pair.transport.landed(SegmentsLanded("call", SEGMENT_BYTES, (number(second),)))
    assert pair.decode.ended("call").error is None
    pair.returned(call, first, second)
    assert pair.prefill.num_closed() == 0


def test_what_is_lent_takes_nothing_of_the_send_budget(pair: Pair) -> None:
    call = pair.start()
    pair.prefill.emit(call, pair.lent.lend(segment(0, 0)), segment(0, 1))
    pair.decode.frames("call", 2)
    pair.prefill.commands.wait_until(lambda commands: BytesSent(call, SEGMENT_BYTES) in commands)
    assert sum(isinstance(command, BytesSent) for command in pair.prefill.commands.all()) == 1


def test_a_receiver_that_gives_nothing_back_loses_the_call() -> None:
    pair = Pair(stall_timeout_s=1.0)  # long enough for what it does take
    call = pair.start()
    pair.prefill.emit(call, pair.lent.lend(segment(0, 0)))
    error = pair.decode.ended("call").error
    assert isinstance(error, PrefillUnavailable) and "gave no segment back" in str(error)
    pair.prefill.closed(call)
    pair.close()


def test_a_call_that_breaks_with_segments_lent_is_closed_which_ends_their_loan(pair: Pair) -> None:
    call = pair.start()
    frame = pair.lent.lend(segment(0, 0))
    pair.prefill.emit(call, frame)
    pair.decode.frames("call", 1)
    pair.transport.break_call(BreakCall("call", "the test says so"))
    pair.prefill.closed(call)
    pair.transport.landed(SegmentsLanded("call", SEGMENT_BYTES, (number(frame),)))
    assert isinstance(pair.decode.ended("call").error, EngineFault)
    pair.returned(call)


def test_segments_of_a_cancelled_row_that_were_not_sent_come_back(pair: Pair) -> None:
    call = pair.start(num_rows=2)
    pair.transport.cancel_rows(CancelHandoffRows("call", (1,)))
    pair.prefill.commands.wait_until(lambda commands: len(commands) == 2)
    frame = pair.lent.lend(segment(1, 0))
    pair.prefill.emit(call, frame)
    pair.returned(call, frame)
    pair.prefill.emit(call, failed(1, retryable=False), failed(0))
    pair.prefill.finish(call)
    assert pair.decode.ended("call").error is None


def test_a_receiver_that_cannot_map_the_pool_gets_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(name: str, *, groups: Sequence[LayerGroupSpec]) -> MappedPool:
        raise PoolUnusable(f"{name} is not here")

    monkeypatch.setattr(grpc_replica, "MappedPool", elsewhere)
    pair = Pair()
    pair.start()
    assert not pair.shares_memory()
    pair.close()


@pytest.mark.parametrize("cause", [TimeoutError("timed out"), OSError(errno.EMFILE, "no descriptor"), None])
def test_a_pool_that_cannot_be_mapped_for_a_moment_is_mapped_later(
    monkeypatch: pytest.MonkeyPatch, cause: OSError | None
) -> None:
    """Without a cause no thread can be started that would map it."""

    class GivenTheThirdTime(MappedPool):
        tries = itertools.count(1)

        def __init__(self, name: str, *, groups: Sequence[LayerGroupSpec]) -> None:
            if next(self.tries) < 3:
                raise RuntimeError("can't start new thread") if cause is None else PoolUnusable(name) from cause
            super().__init__(name, groups=groups)

    monkeypatch.setattr(grpc_replica, "MappedPool", GivenTheThirdTime)
    monkeypatch.setattr(Pair, "timeouts", replace(FAST, pool_retry_s=0.05))
    pair = Pair()
    num_calls = itertools.count(1)

    def shares_memory() -> bool:
        num = next(num_calls)
        pair.transport.start(StartHandoff(f"call {num}", pair.address, (row("0"),)))
        return pair.prefill.opened(num)[-1].shares_memory

    wait_until(shares_memory)
    pair.close()


def test_without_the_secret_of_this_very_pool_there_are_no_tickets(pair: Pair) -> None:
    pair.lent.pool.secret = b"of another pool!"
    pair.start()
    assert not pair.shares_memory()


def test_the_memory_of_a_replica_that_is_gone_is_let_go_of_and_its_socket_removed(pair: Pair) -> None:
    left_behind = DIRECTORY / f"baton-kv-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(left_behind))
    secret = pair.lent.pool.secret
    mapped = [weakref.ref(each) for each in gc.get_objects() if type(each) is MappedPool and each.secret == secret]
    assert mapped
    pair.lose_peer()
    wait_until(lambda: gc.collect() >= 0 and not any(pool() for pool in mapped) and not left_behind.exists())
    assert (DIRECTORY / pair.lent.pool.name).is_socket(), "one of them lives"


def test_giving_back_what_was_not_lent_ends_the_call(pair: Pair) -> None:
    call = pair.start()
    pair.transport.landed(SegmentsLanded("call", 0, (77,)))
    error = pair.decode.ended("call").error
    assert isinstance(error, EngineFault) and "release_segments.numbers" in str(error)
    pair.prefill.closed(call)


def test_a_ticket_that_leads_nowhere_breaks_the_protocol(pair: Pair, mapped: MappedPool) -> None:
    frame = pair.lent.lend(segment(0, 0))
    data = CODEC.encode(frame)
    assert len(data) < 100, "slots that follow each other are a range"
    decoded = CODEC.decode(data, (row(),), mapped)
    assert isinstance(decoded, KvSegment) and isinstance(decoded.shared, SharedKv)
    assert read(decoded.shared) == segment(0, 0).payload
    with pytest.raises(ProtocolError, match=r"kv_segment\.ticket: is into memory that cannot be read"):
        CODEC.decode(data, (row(),))


@pytest.mark.parametrize(
    ("starts", "lengths", "match"),
    [
        ([1], [SEGMENT_TOKENS - 1], "has 31 slots instead of 32"),
        ([1], [SEGMENT_TOKENS, 1], "has 1 starts and 2 lengths of runs for 32 tokens"),
        ([1] * 33, [1] * 33, "has 33 starts and 33 lengths of runs for 32 tokens"),
        ([1, 2], [SEGMENT_TOKENS, 0], "has runs that are none"),
        ([0], [SEGMENT_TOKENS], "is of slots that target does not have in the pool"),
        ([2**32 - 1], [SEGMENT_TOKENS], "is of slots that target does not have in the pool"),
    ],
)
def test_a_ticket_is_checked_field_by_field(
    pair: Pair, mapped: MappedPool, starts: list[int], lengths: list[int], match: str
) -> None:
    frame = prefill_pb2.HandoffFrame.FromString(CODEC.encode(pair.lent.lend(segment(0, 0))))
    ticket = frame.kv_segment.ticket
    ticket.run_starts[:], ticket.run_lengths[:] = starts, lengths
    with pytest.raises(ProtocolError, match=match):
        CODEC.decode(seal(frame), (row(),), mapped)


def test_a_damaged_ticket_is_seen_by_the_checksum(pair: Pair, mapped: MappedPool) -> None:
    sent = CODEC.encode(pair.lent.lend(segment(0, 0)))
    for position in range(len(sent)):
        damaged = sent[:position] + bytes([sent[position] ^ 1]) + sent[position + 1 :]
        with pytest.raises(ProtocolError, match="crc32c: does not match"):
            CODEC.decode(damaged, (row(),), mapped)


@pytest.mark.parametrize(
    ("num_tokens", "match"),
    [
        (MAX_LENT_BYTES // TARGET.token_bytes, "is of slots that target does not have in the pool"),
        (MAX_LENT_BYTES // TARGET.token_bytes + 1, f"is of {MAX_LENT_BYTES + TARGET.token_bytes} bytes, over"),
    ],
)
def test_a_ticket_is_of_no_more_than_a_segment_may_lend(
    pair: Pair, mapped: MappedPool, num_tokens: int, match: str
) -> None:
    frame = prefill_pb2.HandoffFrame.FromString(CODEC.encode(pair.lent.lend(segment(0, 0))))
    frame.kv_segment.num_tokens, frame.kv_segment.ticket.run_lengths[:] = num_tokens, [num_tokens]
    with pytest.raises(ProtocolError, match=match):
        CODEC.decode(seal(frame), (row(num_tokens=num_tokens),), mapped)


def test_the_commands_that_end_loans_are_checked_like_all_others() -> None:
    data = bytearray(encode_release_segments((1, 2, 3)))
    data[-1] ^= 1
    with pytest.raises(ProtocolError, match="crc32c: does not match"):
        decode_command(bytes(data))
