"""A payload is put into a frame's bytes and found there as protobuf would, and no copy of it is made on the way in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import prefill_pb2
from common.rpc.messages import ProtocolError
from common.wire.segment_bytes import joined, split

HEADER = prefill_pb2.KvSegment(row=3, layer_group="target", num_layers=2, num_tokens=300, crc32c=7, num_shards=1)


@given(st.binary(max_size=400))
def test_protobuf_reads_a_frame_that_was_joined_and_split_finds_what_protobuf_wrote(payload: bytes) -> None:
    frame = prefill_pb2.HandoffFrame()
    frame.kv_segment.CopyFrom(HEADER)
    frame.kv_segment.payload = payload
    assert prefill_pb2.HandoffFrame.FromString(joined(HEADER, payload)) == frame
    for data in (joined(HEADER, payload), frame.SerializeToString()):
        header, found = split(data)
        assert found.tobytes() == payload
        assert prefill_pb2.HandoffFrame.FromString(header).kv_segment == HEADER


def test_the_payload_that_was_found_lies_in_the_frame_itself() -> None:
    data = joined(HEADER, np.arange(100, dtype=np.uint8))
    _, payload = split(data)
    assert np.shares_memory(payload, np.frombuffer(data, np.uint8))


def test_two_payloads_are_refused() -> None:
    first = joined(HEADER, b"first")
    twice = prefill_pb2.KvSegment(payload=b"second").SerializeToString()
    with pytest.raises(ProtocolError, match="comes twice"):
        split(first[:1] + bytes([first[1] + len(twice)]) + first[2:] + twice)


@given(st.integers(0, 40))
def test_bytes_that_end_early_are_left_as_they_are(length: int) -> None:
    cut = joined(HEADER, b"a payload of some length")[:length]
    assert split(cut)[0] == cut
