"""Messages of too many fields are refused before they are parsed: 16 MiB hold 8 million empty ones, seconds to parse.

Fields are counted where the bytes have them, those of messages inside too. A list of numbers is one field, as all
encoders pack it.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from common.wire.codec_checks import ProtocolError
from common.wire.varint import read_varint

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}


def require_few_fields(data: bytes, kind: type[Message], *, at_most: int) -> None:
    """Raises ProtocolError naming the field at which there are more. What cannot be read, `parse` refuses."""
    num_fields = 0
    inside: list[tuple[str, Any, int, int]] = [("", kind.DESCRIPTOR, 0, len(data))]
    while inside:
        path, message, position, end = inside.pop()
        while position < end:
            tag, position = read_varint(data, position, end)
            field = message.fields_by_number.get(tag >> 3)
            num_fields += 1
            if num_fields > at_most:
                raise ProtocolError(f"{path}{field.name if field else tag >> 3}", f"is beyond {at_most} fields")
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, position = read_varint(data, position, end)
            elif wire_type == _DELIMITED:
                length, position = read_varint(data, position, end)
                if length and field is not None and field.message_type is not None:
                    inside.append((f"{path}{field.name}.", field.message_type, position, min(position + length, end)))
                position += length
            else:
                position += _WIDTHS.get(wire_type, 0)
