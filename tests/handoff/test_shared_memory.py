"""Shared memory between a prefill edge and a transport on one host: who gets tickets, and when slots are free again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from common.errors import EngineFault, PrefillUnavailable
from common.wire.codec_checks import ProtocolError
from common.wire.codec_commands import decode_command, encode_release_slots
from common.wire.codec_frames import FrameCodec
from common.wire.handoff import KvSegment
from common.wire.kv_ring import KvRing, MappedRing, RingSlot, RingUnusable
from decode_service.handoff import grpc_replica
from decode_service.messages import BreakCall, CancelHandoffRows, SegmentsLanded, StartHandoff
from prefill_service.messages import CallDone, SlotsReturned
from tests.handoff.homes import GrpcHome
from tests.handoff.samples import FINGERPRINT, ROOMY_BUDGET_BYTES, SEGMENT_BYTES, failed, prebuilt, row, segment
from tests.handoff.scripted_prefill import RecordingDecode, ScriptedPrefill
from tests.wire.strategies import VOCAB_SIZE

RING_BYTES = 8 * SEGMENT_BYTES


class Pair(GrpcHome):
    """Both edges around scripted engines, with a ring that the test fills and a decode side that releases nothing."""

    def __init__(self, stall_timeout_s: float = 60.0) -> None:
        self.stall_timeout_s = stall_timeout_s
        self.ring = KvRing(num_bytes=RING_BYTES)
        self.prefill, self.decode = ScriptedPrefill(), RecordingDecode()
        super().__init__(self.prefill, self.decode, FINGERPRINT, ROOMY_BUDGET_BYTES)

    def start(self, num_rows: int = 1) -> str:
        rows = tuple(row(str(number)) for number in range(num_rows))
        self.transport.start(StartHandoff("call", self.address, rows))
        return self.prefill.opened()[0].call_id

    def shares_memory(self) -> bool:
        return self.prefill.opened()[0].shares_memory

    def returned(self, call: str, *slots: RingSlot) -> None:
        """Wait until the prefill engine has heard of them, in this order."""
        wanted = [slot.ticket.generation for slot in slots]

        def holds(commands: list[object]) -> bool:
            found = [c.generations for c in commands if isinstance(c, SlotsReturned) and c.call_id == call]
            return [generation for each in found for generation in each] == wanted

        self.prefill.commands.wait_until(holds)  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        assert self.ring is not None
        self.ring.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def in_slot(ring: KvRing | None, frame: KvSegment) -> tuple[KvSegment, RingSlot]:
    assert ring is not None
    slot = ring.take(frame.num_bytes)
    assert slot is not None
    slot.payload[:] = np.frombuffer(frame.payload, np.uint8)
    return replace(frame, payload=slot.payload, slot=slot), slot


def test_a_ticket_leads_to_the_writers_own_memory(pair: Pair) -> None:
    call = pair.start()
    assert pair.shares_memory()
    frame, slot = in_slot(pair.ring, segment(0, 3))
    pair.prefill.emit(call, frame)
    (arrived,) = pair.decode.frames("call", 1)
    assert isinstance(arrived, KvSegment) and arrived.slot is not None
    assert bytes(arrived.payload) == segment(0, 3).payload
    slot.payload[0] += 1
    assert arrived.payload[0] == slot.payload[0], "no byte of it travelled"


def test_slots_return_when_they_landed_and_only_then_the_call_ends(pair: Pair) -> None:
    call = pair.start()
    (first, first_slot), (second, second_slot) = in_slot(pair.ring, segment(0, 0)), in_slot(pair.ring, segment(0, 1))
    pair.prefill.emit(call, first, second, prebuilt(0))
    pair.prefill.finish(call)
    pair.decode.frames("call", 3)
    pair.transport.landed(SegmentsLanded("call", SEGMENT_BYTES, (first_slot.ticket.generation,)))
    pair.returned(call, first_slot)
    assert pair.decode.num_ends("call") == 0, "a slot is out"
    pair.transport.landed(SegmentsLanded("call", SEGMENT_BYTES, (second_slot.ticket.generation,)))
    assert pair.decode.ended("call").error is None
    pair.returned(call, first_slot, second_slot)
    assert pair.prefill.num_closed() == 0


def test_a_receiver_that_releases_nothing_loses_the_call() -> None:
    pair = Pair(stall_timeout_s=0.1)
    call = pair.start()
    pair.prefill.emit(call, in_slot(pair.ring, segment(0, 0))[0])
    pair.prefill.finish(call)
    error = pair.decode.ended("call").error
    assert isinstance(error, PrefillUnavailable) and "released no slot" in str(error)
    pair.prefill.closed(call)
    pair.close()


def test_a_call_that_breaks_with_slots_out_is_closed_which_frees_them(pair: Pair) -> None:
    call = pair.start()
    frame, slot = in_slot(pair.ring, segment(0, 0))
    pair.prefill.emit(call, frame)
    pair.prefill.deliver([CallDone(call)])
    pair.decode.frames("call", 1)
    pair.transport.break_call(BreakCall("call", "the test says so"))
    pair.prefill.closed(call)
    pair.transport.landed(SegmentsLanded("call", SEGMENT_BYTES, (slot.ticket.generation,)))
    assert isinstance(pair.decode.ended("call").error, EngineFault)
    pair.returned(call)


def test_segments_of_a_cancelled_row_that_were_not_sent_return_their_slots(pair: Pair) -> None:
    call = pair.start(num_rows=2)
    pair.transport.cancel_rows(CancelHandoffRows("call", (1,)))
    pair.prefill.commands.wait_until(lambda commands: len(commands) == 2)
    frame, slot = in_slot(pair.ring, segment(1, 0))
    pair.prefill.emit(call, frame)
    pair.returned(call, slot)
    pair.prefill.emit(call, failed(1, retryable=False), failed(0))
    pair.prefill.finish(call)
    assert pair.decode.ended("call").error is None


def test_a_receiver_that_cannot_map_the_ring_gets_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(name: str) -> MappedRing:
        raise RingUnusable(f"{name} is not here")

    monkeypatch.setattr(grpc_replica, "MappedRing", elsewhere)
    pair = Pair()
    pair.start()
    assert not pair.shares_memory()
    pair.close()


def test_without_the_secret_of_this_very_ring_there_are_no_tickets(pair: Pair) -> None:
    assert pair.ring is not None
    pair.ring.secret = b"of another ring!"
    pair.start()
    assert not pair.shares_memory()


def test_releasing_a_slot_that_the_call_does_not_hold_ends_it(pair: Pair) -> None:
    call = pair.start()
    pair.transport.landed(SegmentsLanded("call", 0, (77,)))
    error = pair.decode.ended("call").error
    assert isinstance(error, EngineFault) and "release_slots.generations" in str(error)
    pair.prefill.closed(call)


def test_a_ticket_into_memory_that_is_not_mapped_or_of_a_slot_used_again_breaks_the_protocol(pair: Pair) -> None:
    assert pair.ring is not None
    codec = FrameCodec(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE)
    frame, slot = in_slot(pair.ring, segment(0, 0))
    mapped = MappedRing(pair.ring.name)
    data = codec.encode(frame)
    assert len(data) < 200
    assert codec.decode(data, (row(),), mapped).num_bytes == SEGMENT_BYTES  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match=r"kv_segment\.ticket: is into shared memory that is not mapped"):
        codec.decode(data, (row(),))
    damaged = data.replace(bytes([slot.ticket.generation]), bytes([9]), 1)
    with pytest.raises(ProtocolError):
        codec.decode(damaged, (row(),), mapped)
    pair.ring.give_back(slot)
    pair.ring.take(1)
    with pytest.raises(ProtocolError, match=r"kv_segment\.ticket: is of no slot that is there"):
        codec.decode(data, (row(),), mapped)


def test_the_commands_that_release_slots_are_checked_like_all_others() -> None:
    data = bytearray(encode_release_slots((1, 2, 3)))
    data[-1] ^= 1
    with pytest.raises(ProtocolError, match="release_slots"):
        decode_command(bytes(data))
