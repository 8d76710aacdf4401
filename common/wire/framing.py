"""The bytes of one message of a handoff call: a payload, the protobuf message, and a checksum of both.

    payload │ HandoffCommand or HandoffFrame, payload_bytes │ crc32c
    └──────────────── covered by the checksum ──────────────┘

The payload comes first, so that it starts at an aligned address and can be written before the rest is known.
"""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO
from typing import TypeVar

import numpy as np
from awscrt.checksums import crc32c
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.errors import FingerprintMismatch
from common.rpc.messages import ProtocolError, parse, require, require_few_fields
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from common.wire.handoff import FramedKv, Payload, WriteKv

MessageT = TypeVar("MessageT", prefill_pb2.HandoffCommand, prefill_pb2.HandoffFrame)

_CHECKSUM_BYTES = prefill_pb2.HandoffTrailer(crc32c=0).ByteSize()
_TRAILER_BYTES = prefill_pb2.HandoffTrailer(payload_bytes=0, crc32c=0).ByteSize()
_ROOM_BYTES = 64
"""Bytes reserved after the payload for the message and the trailer, which take some 50 in a segment.

If they take more, the payload is copied once. The unused rest goes back to the allocator. This rest must be smaller
than the allocator's smallest block: else the freed memory of one frame does not fit the next one.
"""


class FramePayload:
    """KV written directly into the memory of the frame that will be sent, so that no copy is made. It is a FramedKv.

    gRPC sends only `bytes`, which cannot be written. The memory of a BytesIO can be written first, and then be taken
    out as `bytes` without a copy.
    """

    def __init__(self, num_bytes: int, write: WriteKv) -> None:
        """Calls `write` with an array [num_bytes] uint8, which it fills.

        Raises BufferError if `write` keeps a reference to the array. The checksum is computed at once, while the
        payload is in the CPU's caches.
        """
        self._num_bytes = num_bytes
        self._memory = BytesIO(bytes(num_bytes + _ROOM_BYTES))
        array = np.frombuffer(self._memory.getbuffer(), np.uint8, num_bytes)
        write(array)
        self.crc32c: int = crc32c(array)
        del array
        self._memory.truncate(num_bytes)

    def __len__(self) -> int:
        return self._num_bytes

    def followed_by(self, rest: bytes) -> bytes:
        """Returns the payload followed by `rest`. The first call copies nothing; a second one copies the payload."""
        self._memory.seek(self._num_bytes)
        self._memory.truncate()
        self._memory.write(rest)
        return self._memory.getvalue()


def seal(message: MessageT, payload: Payload | FramedKv = b"") -> bytes:
    """Returns the bytes to send: the payload, the message and their checksum.

    Copies the payload once, unless it lies in the memory of the frame already (a FramedKv).
    """
    return seal_bytes(message.SerializeToString(), payload)


def seal_bytes(message: bytes, payload: Payload | FramedKv = b"") -> bytes:
    """Returns the bytes to send: the payload, the serialised message and their checksum.

    Copies the payload once, unless it lies in the memory of the frame already (a FramedKv).
    """
    rest = message + prefill_pb2.HandoffTrailer(payload_bytes=len(payload)).SerializeToString()
    if isinstance(payload, bytes | np.ndarray):
        return b"".join((np.frombuffer(payload, np.uint8).data, _summed(rest, crc32c(payload))))
    return payload.followed_by(_summed(rest, payload.crc32c))


def unseal(kind: type[MessageT], data: bytes, *, most_fields: int) -> tuple[MessageT, NDArray[np.uint8]]:
    """Returns the message in `data`, and its payload as a view of `data`. Checks the checksum first.

    If the checksum is wrong, the message is parsed only to read its protocol version. Raises ProtocolError, which names
    the field, if the bytes are damaged or the message has more than `most_fields` fields (then it is not parsed).
    Raises FingerprintMismatch if the message names another protocol version, even if the checksum is wrong, because
    that version may compute checksums differently.
    """
    trailer = _trailer(data)
    if trailer is None:
        with suppress(ProtocolError):
            _require_own_version(_parsed(kind, data, most_fields))
        raise ProtocolError("crc32c", "does not match the bytes")
    num_bytes = trailer.payload_bytes
    require(num_bytes <= len(data) - _TRAILER_BYTES, "payload_bytes", f"{num_bytes} are more than there are")
    message = _parsed(kind, data[num_bytes:], most_fields)
    _require_own_version(message)
    return message, np.frombuffer(data, np.uint8)[:num_bytes]


def _summed(rest: bytes, payload_crc32c: int) -> bytes:
    """Returns `rest` followed by a trailer with the checksum of the payload and `rest`.

    `payload_crc32c` is the checksum of the payload alone.
    """
    return rest + prefill_pb2.HandoffTrailer(crc32c=crc32c(rest, payload_crc32c)).SerializeToString()


def _trailer(data: bytes) -> prefill_pb2.HandoffTrailer | None:
    """Returns the trailer at the end of `data`, or None if it is missing or the checksum is wrong."""
    with suppress(ProtocolError):
        trailer = parse(prefill_pb2.HandoffTrailer, data[-_TRAILER_BYTES:])
        is_whole = trailer.HasField("payload_bytes") and trailer.HasField("crc32c")
        if is_whole and crc32c(memoryview(data)[:-_CHECKSUM_BYTES]) == trailer.crc32c:
            return trailer
    return None


def _parsed(kind: type[MessageT], data: bytes, most_fields: int) -> MessageT:
    """Parses a message. Raises ProtocolError if it cannot be parsed or has too many fields."""
    require_few_fields(data, kind, at_most=most_fields)
    return parse(kind, data)


def _require_own_version(message: MessageT) -> None:
    """Raises FingerprintMismatch if the message has another protocol version than ours.

    A message without a fingerprint passes: only the first message of a call in each direction has one. The field is the
    same in every version.
    """
    if isinstance(message, prefill_pb2.HandoffCommand):
        fingerprint = message.prefill_batch.fingerprint
        decode, prefill = fingerprint.protocol_version, PROTOCOL_VERSION
    else:
        fingerprint = message.accepted.fingerprint
        decode, prefill = PROTOCOL_VERSION, fingerprint.protocol_version
    if fingerprint.ByteSize() and decode != prefill:
        raise FingerprintMismatch("protocol_version", str(decode), str(prefill))
