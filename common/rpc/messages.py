"""Protobuf messages that a peer sent: parsed, or refused by the field that breaks the protocol."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from common.peer_text import peer_text

MessageT = TypeVar("MessageT", bound=Message)

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}


class ProtocolError(Exception):
    """The peer sent what the protocol forbids. `field` is the path of the offending field. Both are peer_text."""

    def __init__(self, field: str, message: str) -> None:
        self.field = peer_text(field)
        self.message = peer_text(message)
        super().__init__(self.field, self.message)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ProtocolError(field, message)


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """The message in `data`. Raises ProtocolError when it holds none of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(kind.DESCRIPTOR.name, f"not a message of this kind ({error})") from error


def require_few_fields(data: bytes, kind: type[Message], *, at_most: int) -> None:
    """Refuse a message of too many fields before it is parsed: 16 MiB hold 8 million empty ones, seconds to parse.

    Fields are counted where the bytes have them, those of messages inside too. A list of numbers is one field, as all
    encoders pack it. Raises ProtocolError naming the field at which there are more. What cannot be read, `parse`
    refuses.
    """
    if len(data) <= at_most:  # a field has a byte at least
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
