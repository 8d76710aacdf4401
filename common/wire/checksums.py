"""CRC-32C of a handoff's messages, over values rather than protobuf bytes, which no two versions promise alike.

Every field but `crc32c`, in the order of their numbers, so that one that is added is covered too. A number is
little-endian, in the width of its type. Bytes, and text in UTF-8, come after their length; what is repeated after its
count, maps by key; a message counts as its fields. Lengths and counts are uint32.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
from awscrt.checksums import combine_crc32c, crc32c
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from common.wire.framed_payload import FramedPayload
from common.wire.handoff import Payload

_Parts = Callable[[Any], Iterator[Payload]]
_NUMBERS = {
    FieldDescriptor.CPPTYPE_BOOL: "<?",
    FieldDescriptor.CPPTYPE_ENUM: "<i",
    FieldDescriptor.CPPTYPE_INT32: "<i",
    FieldDescriptor.CPPTYPE_UINT32: "<I",
    FieldDescriptor.CPPTYPE_INT64: "<q",
    FieldDescriptor.CPPTYPE_UINT64: "<Q",
    FieldDescriptor.CPPTYPE_FLOAT: "<f",
    FieldDescriptor.CPPTYPE_DOUBLE: "<d",
}
"""Formats that struct and numpy both read."""
_SHORT_BYTES = 256
"""Values up to it are summed together: there are dozens in a segment, and each sum is a call."""


def checksum(message: Message, **known: Payload) -> int:
    """`known`: fields of bytes whose value is at hand; to read a payload from its message would copy it."""
    crc: int = 0
    short: list[bytes] = []
    for name, parts in _fields(message.DESCRIPTOR):
        for part in parts(known[name] if name in known else getattr(message, name)):
            if isinstance(part, bytes) and len(part) <= _SHORT_BYTES:
                short.append(part)
                continue
            crc = _extended(crc32c(b"".join(short), crc), part)
            short.clear()
    crc = crc32c(b"".join(short), crc)
    return crc


def _extended(crc: int, part: Payload) -> int:
    known = part.crc32c if isinstance(part, FramedPayload) else None
    extended: int = crc32c(part, crc) if known is None else combine_crc32c(crc, known, len(part))
    return extended


@cache
def _fields(descriptor: Descriptor) -> tuple[tuple[str, _Parts], ...]:
    fields = sorted(descriptor.fields, key=lambda field: field.number)
    return tuple((field.name, _parts_of(field)) for field in fields if field.name != "crc32c")


def _parts_of(field: FieldDescriptor) -> _Parts:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = (_single(kind.fields_by_name[name]) for name in ("key", "value"))
        return partial(_entries, key, value)
    if not field.is_repeated:
        return _single(field)
    if (number := _NUMBERS.get(field.cpp_type)) is not None:
        return partial(_numbers, np.dtype(number))
    return partial(_repeated, _single(field))


def _single(field: FieldDescriptor) -> _Parts:
    if field.message_type is not None:
        return _message
    if (number := _NUMBERS.get(field.cpp_type)) is not None:
        return partial(_number, struct.Struct(number))
    return _text if field.type == FieldDescriptor.TYPE_STRING else _bytes


def _number(packed: struct.Struct, value: float) -> Iterator[Payload]:
    yield packed.pack(value)


def _numbers(dtype: np.dtype[Any], values: Any) -> Iterator[Payload]:
    yield _count(values)
    if values:
        yield np.array(values, dtype).tobytes()


def _bytes(value: bytes) -> Iterator[Payload]:
    yield _count(value)
    yield value


def _text(value: str) -> Iterator[Payload]:
    yield from _bytes(value.encode())


def _repeated(parts: _Parts, values: Any) -> Iterator[Payload]:
    yield _count(values)
    for value in values:
        yield from parts(value)


def _entries(key: _Parts, value: _Parts, entries: Any) -> Iterator[Payload]:
    yield _count(entries)
    for name in sorted(entries):
        yield from key(name)
        yield from value(entries[name])


def _message(message: Message) -> Iterator[Payload]:
    for name, parts in _fields(message.DESCRIPTOR):
        yield from parts(getattr(message, name))


def _count(values: Any) -> bytes:
    return struct.pack("<I", len(values))
