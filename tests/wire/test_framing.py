"""Tests of the bytes of a message: the payload, the fields after it, and the checksum over both."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.rpc.messages import ProtocolError
from common.wire.framing import FramePayload, seal, seal_bytes, unseal

MESSAGE = prefill_pb2.HandoffFrame(kv_segment=prefill_pb2.KvSegment(row=3, layer_group="target", num_shards=1))
FIELDS = MESSAGE.SerializeToString()


def framed(payload: bytes) -> FramePayload:
    return FramePayload(len(payload), lambda array: np.copyto(array, np.frombuffer(payload, np.uint8)))


def unsealed(data: bytes) -> tuple[prefill_pb2.HandoffFrame, NDArray[np.uint8]]:
    return unseal(prefill_pb2.HandoffFrame, data, most_fields=1024)


def test_the_layout_spelt_out() -> None:
    """The two tags take one byte each: field 14 is fixed64, and field 15 is fixed32. The checksum covers everything
    before its field.
    """
    summed = b"payload" + FIELDS + struct.pack("<BQ", 14 << 3 | 1, 7)
    assert seal(MESSAGE, b"payload") == summed + struct.pack("<BI", 15 << 3 | 5, crc32c(summed))


@given(st.binary(max_size=400))
def test_a_payload_arrives_as_it_was_sent(payload: bytes) -> None:
    for sent in (
        seal(MESSAGE, payload),
        seal(MESSAGE, np.frombuffer(payload, np.uint8)),
        seal(MESSAGE, framed(payload)),
    ):
        message, arrived = unsealed(sent)
        assert message.kv_segment == MESSAGE.kv_segment
        assert arrived.tobytes() == payload


def test_a_payload_that_arrived_lies_in_the_bytes_themselves() -> None:
    sent = seal(MESSAGE, bytes(100))
    _, payload = unsealed(sent)
    assert np.shares_memory(payload, np.frombuffer(sent, np.uint8))
    assert payload.ctypes.data % 16 == 0


@pytest.mark.parametrize("cut", [lambda sent: sent[1:], lambda sent: sent[:-1], lambda sent: sent + b"\0"])
def test_bytes_that_are_missing_or_too_many_are_seen(cut: Callable[[bytes], bytes]) -> None:
    for sent in (seal(MESSAGE, b"payload"), seal(MESSAGE)):
        with pytest.raises(ProtocolError, match="crc32c"):
            unsealed(cut(sent))


@given(st.integers(0, 60))
def test_bytes_that_end_early_are_seen(length: int) -> None:
    sent = seal(MESSAGE, b"a payload of some length")
    with pytest.raises(ProtocolError, match="crc32c"):
        unsealed(sent[: min(length, len(sent) - 1)])


def test_a_payload_beyond_the_bytes_is_refused() -> None:
    trailer = prefill_pb2.HandoffTrailer(payload_bytes=len(FIELDS) + 1).SerializeToString()
    crc = prefill_pb2.HandoffTrailer(crc32c=crc32c(FIELDS + trailer)).SerializeToString()
    with pytest.raises(ProtocolError) as caught:
        unsealed(FIELDS + trailer + crc)
    assert caught.value.field == "payload_bytes"


def test_a_field_that_only_a_later_version_knows_is_covered_and_ignored() -> None:
    sent = seal_bytes(FIELDS + b"\xa0\x06\x01")  # field 100
    assert unsealed(sent)[0].kv_segment == MESSAGE.kv_segment
    with pytest.raises(ProtocolError, match="crc32c"):
        unsealed(sent.replace(b"\xa0\x06\x01", b"\xa0\x06\x00"))


# ---- a payload in the memory of its frame ----------------------------------------------------------------------------


@given(st.binary(max_size=2000), st.binary(max_size=600))
def test_a_framed_payload_leaves_as_one_that_is_joined(payload: bytes, rest: bytes) -> None:
    """Some of the fields after the payload are longer than the room that is kept for them."""
    assert framed(payload).followed_by(rest) == payload + rest
    assert framed(payload).crc32c == crc32c(payload)
    assert len(framed(payload)) == len(payload)


def test_the_frame_is_the_memory_that_the_payload_was_written_into() -> None:
    places: list[int] = []
    payload = FramePayload(1 << 16, lambda array: places.append(array.ctypes.data))
    assert np.frombuffer(seal(MESSAGE, payload), np.uint8).ctypes.data == places[0]
    assert places[0] % 16 == 0


def test_a_second_frame_of_a_payload_leaves_the_first_as_it_was() -> None:
    payload = framed(b"key and value")
    first, second = payload.followed_by(b" first"), payload.followed_by(b" second")
    assert (first, second) == (b"key and value first", b"key and value second")


def test_nobody_can_write_what_may_be_on_its_way() -> None:
    kept: list[NDArray[np.uint8]] = []
    with pytest.raises(BufferError):
        FramePayload(8, kept.append)
