"""Parses protobuf messages from a peer, and refuses invalid ones with an error that names the field."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from common.peer_text import peer_text

MessageT = TypeVar("MessageT", bound=Message)

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}


class ProtocolError(Exception):
    """The peer's message breaks the protocol. `field` is the path of the invalid field.

    `field` and `message` are made safe to log and to show, by `peer_text`.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = peer_text(field)
        self.message = peer_text(message)
        super().__init__(self.field, self.message)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def require(condition: bool, field: str, message: str) -> None:
    """Raises ProtocolError for `field`, unless `condition` is True."""
    if not condition:
        raise ProtocolError(field, message)


def require_at_most(limit: int, field: str, number: int) -> None:
    """Raises ProtocolError if `field` has more than `limit` entries. `number` says how many it has."""
    require(number <= limit, field, f"has {number}, more than {limit}")


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """Returns the message of type `kind` in `data`. Raises ProtocolError if it cannot be parsed."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(kind.DESCRIPTOR.name, f"not a message of this kind ({error})") from error


def require_few_fields(data: bytes, kind: type[Message], *, at_most: int) -> None:
    """Raises ProtocolError if the message in `data` has more than `at_most` fields. Call it before parsing.

    16 MiB can hold 8 million empty fields, which take seconds to parse. The count includes fields of nested messages. A
    packed list of numbers, as all encoders write it, counts as one field. The error names the field at which the limit
    is exceeded. Malformed bytes are not an error here: `parse` refuses them.
    """
    if len(data) <= at_most:  # a field takes at least one byte
        return
    num_fields = 0
    inside: list[tuple[str, Any, int, int]] = [("", kind.DESCRIPTOR, 0, len(data))]
    while inside:
        path, message, position, end = inside.pop()
        while position < end:
            tag, position = _varint(data, position, end)
            field = message.fields_by_number.get(tag >> 3)
            num_fields += 1
            if num_fields > at_most:
                raise ProtocolError(f"{path}{field.name if field else tag >> 3}", f"is beyond {at_most} fields")
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, position = _varint(data, position, end)
            elif wire_type == _DELIMITED:
                length, position = _varint(data, position, end)
                if length and field is not None and field.message_type is not None:
                    inside.append((f"{path}{field.name}.", field.message_type, position, min(position + length, end)))
                position += length
            else:
                position += _WIDTHS.get(wire_type, 0)


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Returns the varint at `position`, and the position after it.

    A varint that is cut off at `end`, or too long, is no error here: the value is that of the bytes read.
    """
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift == 70:
            break
    return value, position
