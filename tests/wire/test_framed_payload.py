"""A payload made in the bytes of its frame leaves as one that is joined to its fields would, and is not copied."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import prefill_pb2
from common.wire.checksums import checksum
from common.wire.codec_segment import encode_segment
from common.wire.framed_payload import FramedPayload
from common.wire.handoff import KvSegment
from common.wire.segment_bytes import split

NUMBERS = st.integers(0, 2**32 - 1)


def framed(layer_group: str, payload: bytes, *, is_sealed: bool = True) -> FramedPayload:
    made = FramedPayload.of(layer_group, len(payload))
    made[:] = np.frombuffer(payload, np.uint8)
    if is_sealed:
        made.seal()
    return made


@given(st.binary(max_size=300), st.sampled_from(["target", "draft", "a", "ü" * 40]), st.tuples(*[NUMBERS] * 5))
def test_protobuf_reads_the_same_message_whatever_its_numbers_are(
    payload: bytes, layer_group: str, numbers: tuple[int, int, int, int, int]
) -> None:
    row, layer_start, num_layers, token_start, num_tokens = numbers
    copied, made = (
        encode_segment(KvSegment(row, layer_group, layer_start, num_layers, token_start, num_tokens, each))
        for each in (payload, framed(layer_group, payload))
    )
    parse = prefill_pb2.HandoffFrame.FromString
    assert parse(made) == parse(copied)
    (made_header, made_payload), (copied_header, _) = split(made), split(copied)
    assert made_payload.tobytes() == payload
    assert parse(made_header) == parse(copied_header)


def test_the_frame_is_the_memory_that_the_payload_was_written_into() -> None:
    payload = framed("target", b"key and value")
    data = encode_segment(KvSegment(1, "target", 0, 1, 0, 1, payload))
    assert np.shares_memory(np.frombuffer(data, np.uint8), payload)
    assert payload.ctypes.data % 4 == 0


def test_a_second_frame_of_a_payload_leaves_the_first_as_it_was() -> None:
    payload = framed("target", b"key and value")
    first = encode_segment(KvSegment(1, "target", 0, 1, 0, 1, payload))
    before = bytes(bytearray(first))
    second = encode_segment(KvSegment(2, "target", 0, 1, 0, 1, payload))
    assert first == before
    assert prefill_pb2.HandoffFrame.FromString(second).kv_segment.row == 2


@given(st.binary(max_size=2000), st.binary(max_size=40))
def test_a_sealed_payload_is_not_summed_again(payload: bytes, text: bytes) -> None:
    header = prefill_pb2.KvSegment(row=7, layer_group=text.hex(), num_shards=1)
    made = framed("target", payload)
    made[:] = 0
    assert checksum(header, payload=made) == checksum(header, payload=payload)


def test_a_payload_that_is_not_sealed_is_summed_as_it_is() -> None:
    made = framed("target", b"before", is_sealed=False)
    made[:] = np.frombuffer(b"after!", np.uint8)
    header = prefill_pb2.KvSegment(row=7)
    assert checksum(header, payload=made) == checksum(header, payload=b"after!")


@pytest.mark.parametrize(
    "make", [lambda made: made[4:], lambda made: made.copy(), lambda m: pickle.loads(pickle.dumps(m))]
)
def test_what_is_made_of_a_payload_has_neither_its_frame_nor_its_sum(make) -> None:  # type: ignore[no-untyped-def]
    other = make(framed("target", b"key and value"))
    header = prefill_pb2.KvSegment(layer_group="target")
    assert other.crc32c is None and other.frame(header) is None
    assert checksum(header, payload=other) == checksum(header, payload=other.tobytes())


def test_an_array_of_it_keeps_its_bytes_alive() -> None:
    values = np.frombuffer(framed("target", bytes(range(200)) * 100), np.uint8)
    part = framed("target", bytes(range(200)) * 100)[200:]
    others = [framed("target", b"\xff" * 20000) for _ in range(20)]
    assert bytes(values) == bytes(range(200)) * 100
    assert bytes(part) == bytes(range(200)) * 99
    assert len(others) == 20
