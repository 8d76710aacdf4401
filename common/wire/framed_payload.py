"""A payload made where it leaves: in the bytes of its HandoffFrame, behind room for the segment's fields.

frame: tag, length │ fields, each number in five bytes │ tag, length │ payload
       └──────────── room, the same for every segment of a layer group ──┘

How long a frame is before its payload is so known before the row's number and the checksum are. gRPC takes nothing but
`bytes`: their memory is written before anybody has seen them, which is what the C interface gives it out for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from awscrt.checksums import crc32c
from google.protobuf.descriptor import FieldDescriptor

from baton.v1 import prefill_pb2
from common.rpc.messages import varint

_DELIMITED, _FIXED32 = 2, 5
_NUMBER_WIDTH = 5
"""Of any 32 bits as a varint, and the most that protobuf reads of a length."""
_ALIGNMENT = 4
_FIELDS = [field for field in prefill_pb2.KvSegment.DESCRIPTOR.fields if field.name not in ("payload", "ticket")]
_SEGMENT_TAG = prefill_pb2.HandoffFrame.DESCRIPTOR.fields_by_name["kv_segment"].number << 3 | _DELIMITED
_PAYLOAD_TAG = prefill_pb2.KvSegment.DESCRIPTOR.fields_by_name["payload"].number << 3 | _DELIMITED
_LENGTHS = 2 * (1 + _NUMBER_WIDTH)

_bytes_of_size = ctypes.pythonapi.PyBytes_FromStringAndSize
_bytes_of_size.restype = ctypes.py_object
_bytes_of_size.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


class FramedPayload(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """[payload bytes] uint8, writable until it is sealed. What is made of it, copies too, has neither frame nor sum."""

    _frame: bytes | None
    _crc32c: int | None

    @classmethod
    def of(cls, layer_group: str, num_bytes: int) -> FramedPayload:
        """Not initialised; begins at a multiple of 4 bytes."""
        room = _LENGTHS + len(_fields(prefill_pb2.KvSegment(layer_group=layer_group)))
        room += -room % _ALIGNMENT
        frame: bytes = _bytes_of_size(None, room + num_bytes)
        payload = np.asarray(_Writable(frame))[room:].view(cls)
        payload._frame = frame
        return payload

    @classmethod
    def new(cls, layer_group: str, num_bytes: int) -> tuple[FramedPayload, Callable[[], None]]:
        """A NewPayload."""
        payload = cls.of(layer_group, num_bytes)
        return payload, payload.seal

    def __array_finalize__(self, made_of: object) -> None:
        self._frame = self._crc32c = None

    @property
    def crc32c(self) -> int | None:
        """Of the payload, once it is sealed."""
        return self._crc32c

    def seal(self) -> None:
        """Nobody writes it any more. Best called where it was written last: there it is still in the caches."""
        self._crc32c = crc32c(self)

    def frame(self, header: prefill_pb2.KvSegment) -> bytes | None:
        """The HandoffFrame of `header`, which has no payload, with this one; copies no payload. None without a frame.

        Only once: these are the same bytes for every header.
        """
        frame, self._frame = self._frame, None
        if frame is None:
            return None
        room = len(frame) - len(self)
        fields = _fields(header, filled_to=room - _LENGTHS) + _delimited(_PAYLOAD_TAG, len(self))
        head = _delimited(_SEGMENT_TAG, len(fields) + len(self)) + fields
        assert len(head) == room, "a header of the layer group that the room was made for"
        np.asarray(_Writable(frame))[:room] = np.frombuffer(head, np.uint8)
        return frame


class _Writable:
    """The memory of bytes for numpy, which keeps this object, and so the bytes, for as long as it uses it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        address = np.frombuffer(data, np.uint8).ctypes.data
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (len(data),), "data": (address, False)}


def _fields(header: prefill_pb2.KvSegment, *, filled_to: int = 0) -> bytes:
    """Every field but the payload, zeros too; of the same length whatever the numbers are. `filled_to`: at most 5 more
    bytes, all in the last number.
    """
    *others, last = _FIELDS
    encoded = b"".join(_field(field, getattr(header, field.name), _NUMBER_WIDTH) for field in others)
    return encoded + _field(last, getattr(header, last.name), max(_NUMBER_WIDTH, filled_to - len(encoded) - 1))


def _field(field: FieldDescriptor, value: Any, width: int) -> bytes:
    if field.type == FieldDescriptor.TYPE_STRING:
        text: bytes = value.encode()
        return bytes((field.number << 3 | _DELIMITED,)) + varint(len(text)) + text
    if field.type == FieldDescriptor.TYPE_FIXED32:
        return bytes((field.number << 3 | _FIXED32,)) + int(value).to_bytes(4, "little")
    assert field.type == FieldDescriptor.TYPE_UINT32, f"{field.name} has no fixed width"
    return bytes((field.number << 3,)) + varint(value, width=width)


def _delimited(tag: int, num_bytes: int) -> bytes:
    return bytes((tag,)) + varint(num_bytes, width=_NUMBER_WIDTH)
