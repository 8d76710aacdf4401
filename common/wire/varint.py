"""Protobuf's numbers of variable length."""

from __future__ import annotations


def varint(value: int, *, width: int = 1) -> bytes:
    """In at least `width` bytes, of which the last ones add nothing."""
    encoded = bytearray()
    while value > 127 or len(encoded) + 1 < width:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The number there and the position behind it."""
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift == 70:
            break
    return value, position
