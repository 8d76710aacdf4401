"""Hypothesis strategies for valid and invalid protobuf bytes, whose fields may be absent, extreme, repeated, of another
wire type, or unknown.
"""

from __future__ import annotations

import struct
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
NUMBERS = (0, 1, 2, 3, 4, 5, 40, 64, 65, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e-45, 1e-30, 1e30, 3.4e38, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "a",
    "target",
    "user",
    "system",
    "assistant",
    "<|start|>",
    "<|end|>",
    "<|pad|><|unknown|>",
    "\0\x1b[2J\r\n\t\x7f\u2028\ufeff\u202e",
    "\U0001f600é\u0301",
    "{{ 7 * 7 }}{% raise %}",
    "a" * 20_000,
    "\U0001f600" * 5_000,
)
NOT_TEXT = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"ok\xf5\x80")
_MANY = 3_000
_MAX_DEPTH = 4


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes((*encoded, value))


def tagged(number: int, wire_type: int, payload: bytes) -> bytes:
    return varint(number << 3 | wire_type) + payload


def delimited(payload: bytes) -> bytes:
    return varint(len(payload)) + payload


_varints = st.sampled_from(NUMBERS).map(varint) | st.integers(0, 70).map(varint)
_float32s = st.sampled_from(FLOATS).map(lambda value: struct.pack("<f", value))
_float64s = st.sampled_from(FLOATS).map(lambda value: struct.pack("<d", value))
_fixed32s = st.sampled_from(NUMBERS).map(lambda value: struct.pack("<I", value & 0xFFFFFFFF))
_fixed64s = st.sampled_from(NUMBERS).map(lambda value: struct.pack("<Q", value))
_texts = st.sampled_from(TEXTS).map(str.encode) | st.sampled_from(NOT_TEXT) | st.text(max_size=6).map(str.encode)
_blobs = st.binary(max_size=24) | st.sampled_from((b"", bytes(96), bytes(192), b"\xff" * 96))

_SCALARS: dict[int, tuple[int, st.SearchStrategy[bytes]]] = {
    FieldDescriptor.TYPE_FLOAT: (FIXED32, _float32s),
    FieldDescriptor.TYPE_DOUBLE: (FIXED64, _float64s),
    FieldDescriptor.TYPE_FIXED32: (FIXED32, _fixed32s),
    FieldDescriptor.TYPE_FIXED64: (FIXED64, _fixed64s),
    FieldDescriptor.TYPE_STRING: (LENGTH, _texts.map(delimited)),
    FieldDescriptor.TYPE_BYTES: (LENGTH, _blobs.map(delimited)),
}
_VARINT = (VARINT, _varints)
_ANY_PAYLOAD = (
    st.tuples(st.just(VARINT), _varints)
    | st.tuples(st.just(FIXED64), _fixed64s)
    | st.tuples(st.just(LENGTH), _blobs.map(delimited))
    | st.tuples(st.just(FIXED32), _fixed32s)
    | st.tuples(st.sampled_from((3, 4, 6, 7)), st.just(b""))  # groups, and numbers that are no wire type
)


def _field(field: Any, depth: int) -> st.SearchStrategy[bytes]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        inside = wire_messages(field.message_type, depth=depth + 1) if depth < _MAX_DEPTH else st.just(b"")
        return inside.map(lambda payload: tagged(field.number, LENGTH, delimited(payload)))
    wire_type, payloads = _SCALARS.get(field.type, _VARINT)
    one = payloads.map(lambda payload: tagged(field.number, wire_type, payload))
    if wire_type == LENGTH or not field.is_repeated:
        return one
    packed = st.lists(payloads, max_size=6).map(b"".join)
    many = payloads.map(lambda payload: payload * _MANY)
    return one | (packed | many).map(lambda payload: tagged(field.number, LENGTH, delimited(payload)))


def wire_messages(descriptor: Descriptor, *, depth: int = 0) -> st.SearchStrategy[bytes]:
    """Returns a strategy for bytes that begin with fields of this message type. Most of them parse: protobuf lets later
    fields override earlier ones.
    """
    stranger = st.tuples(
        st.sampled_from((*(field.number for field in descriptor.fields), 8, 9, 99, 2**29 - 1)), _ANY_PAYLOAD
    ).map(lambda drawn: tagged(drawn[0], *drawn[1]))
    known = [_field(field, depth) for field in descriptor.fields]
    fields = st.one_of(*known, *known, stranger)
    return st.lists(fields, max_size=5).map(b"".join)


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Draws one of `seeds` and changes, cuts out, repeats or appends some bytes."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 3)):
            case 0 if position < len(data):
                data[position] ^= draw(st.integers(1, 255))
            case 1:
                del data[position : position + draw(st.integers(1, 8))]
            case 2:
                data[position:position] = data[position : position + draw(st.integers(1, 40))]
            case _:
                data[position:position] = draw(st.binary(min_size=1, max_size=6))
    return bytes(data)


def hostile_messages(descriptor: Descriptor, seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Draws a seed with some fields overridden, fields without a seed, a damaged seed, or arbitrary bytes."""
    fields = wire_messages(descriptor)
    overridden = st.tuples(st.sampled_from(seeds), fields).map(b"".join)
    return st.one_of(overridden, overridden, fields, damaged(seeds), st.binary(max_size=64), st.sampled_from(seeds))
