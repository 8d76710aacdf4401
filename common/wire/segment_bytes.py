"""A segment's payload in the bytes of its HandoffFrame, put there and found there without protobuf copying it.

protobuf would copy it four times: into the message, into the serialised bytes, out of those, and for every look at it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.rpc.messages import read_varint, require, varint
from common.wire.handoff import Payload

_DELIMITED = 2
_SEGMENT_TAG = prefill_pb2.HandoffFrame.DESCRIPTOR.fields_by_name["kv_segment"].number << 3 | _DELIMITED
_PAYLOAD_TAG = prefill_pb2.KvSegment.DESCRIPTOR.fields_by_name["payload"].number << 3 | _DELIMITED
assert max(_SEGMENT_TAG, _PAYLOAD_TAG) < 128, "tags of one byte"
_WIDTHS = {1: 8, 5: 4}


def joined(header: prefill_pb2.KvSegment, payload: Payload) -> bytes:
    """The bytes of a HandoffFrame whose segment is `header`, which has no payload, with `payload`. Copies it once."""
    fields = header.SerializeToString() + bytes((_PAYLOAD_TAG,)) + varint(len(payload))
    frame = bytes((_SEGMENT_TAG,)) + varint(len(fields) + len(payload))
    return b"".join((frame, fields, np.frombuffer(payload, np.uint8).data))


def split(data: bytes) -> tuple[bytes, NDArray[np.uint8]]:
    """A HandoffFrame's bytes without its segment's payload, and the payload where it lies in `data`.

    Empty when there is none. What cannot be read is left for `parse` to refuse. Raises ProtocolError when a frame has
    two payloads.
    """
    nothing = np.frombuffer(b"", np.uint8)
    if not data or data[0] != _SEGMENT_TAG:
        return data, nothing
    length, position = read_varint(data, 1, len(data))
    if position + length != len(data):
        return data, nothing
    found: tuple[int, int, int] | None = None
    begin = position
    while position < len(data):
        start = position
        tag, position = read_varint(data, position, len(data))
        if tag & 7 == _DELIMITED:
            length, position = read_varint(data, position, len(data))
            if tag == _PAYLOAD_TAG:
                require(found is None, "kv_segment.payload", "comes twice")
                found = (start, position, position + length)
            position += length
        elif tag & 7 == 0:
            _, position = read_varint(data, position, len(data))
        else:
            position += _WIDTHS.get(tag & 7, 0)
    if found is None or position != len(data):
        return data, nothing
    start, payload_start, payload_end = found
    fields = data[begin:start] + data[payload_end:]
    payload = np.frombuffer(data, np.uint8, payload_end - payload_start, payload_start)
    return bytes((_SEGMENT_TAG,)) + varint(len(fields)) + fields, payload
