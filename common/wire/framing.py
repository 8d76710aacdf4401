"""A message of a Handoff's streams as bytes: its payload, the message, and a checksum of both as they are sent.

    payload │ HandoffCommand or HandoffFrame, payload_bytes │ crc32c
    └──────────────── what is summed ───────────────────────┘

The payload is first, so that it is aligned as its memory is and may lie there before the rest is known.
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
"""A segment's message and trailer have some 50; longer ones only cost a copy. What is left over goes back to the
allocator, and if that is more than its smallest block, the frame's memory no longer fits the next one when it is freed.
"""


class FramePayload:
    """A FramedKv: to make its frame copies nothing.

    gRPC sends nothing but `bytes`. A BytesIO lets its memory be written, and hands it out as bytes once nobody can.
    """

    def __init__(self, num_bytes: int, write: WriteKv) -> None:
        """`write` fills the array [num_bytes] that it is given and keeps no reference to it, or BufferError is raised.

        The payload is summed at once, while it is in the caches.
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
        """The payload and `rest`. A second call copies the payload: the first one's bytes are given away."""
        self._memory.seek(self._num_bytes)
        self._memory.truncate()
        self._memory.write(rest)
        return self._memory.getvalue()


def seal(message: MessageT, payload: Payload | FramedKv = b"") -> bytes:
    """The bytes to send. Copies the payload once, a FramedKv not at all."""
    return seal_bytes(message.SerializeToString(), payload)


def seal_bytes(message: bytes, payload: Payload | FramedKv = b"") -> bytes:
    """`seal` of a message that is serialised already."""
    rest = message + prefill_pb2.HandoffTrailer(payload_bytes=len(payload)).SerializeToString()
    if isinstance(payload, bytes | np.ndarray):
        return b"".join((np.frombuffer(payload, np.uint8).data, _summed(rest, crc32c(payload))))
    return payload.followed_by(_summed(rest, payload.crc32c))


def unseal(kind: type[MessageT], data: bytes, *, most_fields: int) -> tuple[MessageT, NDArray[np.uint8]]:
    """Returns the message in `data`, and its payload where it lies there. Nothing is taken for true before the checksum
    is: a message whose checksum is wrong is parsed for its protocol version alone.

    Raises ProtocolError, naming the field, for damaged bytes, and for a message of more than `most_fields` fields,
    which is not parsed; FingerprintMismatch for a message that names another protocol version, whatever its
    checksum is: it may sum its bytes in another way.
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
    """`rest`, which follows a payload of that sum, and the sum of both."""
    return rest + prefill_pb2.HandoffTrailer(crc32c=crc32c(rest, payload_crc32c)).SerializeToString()


def _trailer(data: bytes) -> prefill_pb2.HandoffTrailer | None:
    """None when the bytes are not what was sent."""
    with suppress(ProtocolError):
        trailer = parse(prefill_pb2.HandoffTrailer, data[-_TRAILER_BYTES:])
        is_whole = trailer.HasField("payload_bytes") and trailer.HasField("crc32c")
        if is_whole and crc32c(memoryview(data)[:-_CHECKSUM_BYTES]) == trailer.crc32c:
            return trailer
    return None


def _parsed(kind: type[MessageT], data: bytes, most_fields: int) -> MessageT:
    require_few_fields(data, kind, at_most=most_fields)
    return parse(kind, data)


def _require_own_version(message: MessageT) -> None:
    """A call's first message in either direction has the version, in the same place whatever the version is."""
    if isinstance(message, prefill_pb2.HandoffCommand):
        fingerprint = message.prefill_batch.fingerprint
        decode, prefill = fingerprint.protocol_version, PROTOCOL_VERSION
    else:
        fingerprint = message.accepted.fingerprint
        decode, prefill = PROTOCOL_VERSION, fingerprint.protocol_version
    if fingerprint.ByteSize() and decode != prefill:
        raise FingerprintMismatch("protocol_version", str(decode), str(prefill))
