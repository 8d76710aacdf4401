"""Encodes the frames of a handoff call as bytes of `baton.v1.HandoffFrame`, and decodes them.

Frames are the messages that a prefill service sends to a decode service.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.v1 import prefill_pb2
from common.errors import FingerprintMismatch, RowFailure
from common.peer_text import peer_text
from common.rpc.messages import ProtocolError, require
from common.wire.codec_fingerprint import decode_fingerprint, encode_fingerprint
from common.wire.codec_logprobs import decode_row_logprobs, encode_row_logprobs
from common.wire.codec_prebuilt import decode_prebuilt, encode_prebuilt
from common.wire.codec_segment import ReadablePool, decode_segment, encode_segment
from common.wire.fingerprint import Fingerprint, first_difference
from common.wire.framing import seal, unseal
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, PrebuiltBatch, RowFailed, RowLogprobs

_FIELDS_A_ROW = 16
"""The most protobuf fields per row: three for its log-probabilities, and one in each column that is sent unpacked."""
_OTHER_FIELDS = 1024
"""The most other fields: enough for a fingerprint of 64 layer groups and seed columns, and each group's byte counts."""


class FrameCodec:
    """Encodes and decodes the frames of Handoff calls between two services that both have `fingerprint`."""

    def __init__(self, *, fingerprint: Fingerprint, vocab_size: int) -> None:
        self._fingerprint = fingerprint
        self._groups = {group.name: group for group in fingerprint.layer_groups}
        self._vocab_size = vocab_size

    def encode(self, frame: Frame) -> bytes:
        """Returns the bytes to send. Copies a payload once, unless it lies in the memory of the frame already (a
        FramedKv).
        """
        message = prefill_pb2.HandoffFrame()
        match frame:
            case Accepted():
                message.accepted.fingerprint.CopyFrom(encode_fingerprint(self._fingerprint))
                message.accepted.instance_id = frame.instance_id
            case KvSegment():
                encode_segment(frame, message.kv_segment)
                return seal(message, frame.payload if frame.framed is None else frame.framed)
            case RowLogprobs():
                encode_row_logprobs(frame, message.row_logprobs)
            case PrebuiltBatch():
                encode_prebuilt(frame, message.prebuilt_batch)
            case RowFailed():
                message.row_failed.row = frame.row
                message.row_failed.reason = prefill_pb2.RowFailure.Value(f"ROW_FAILURE_{frame.reason}")
                message.row_failed.retryable = frame.retryable
                message.row_failed.retry_after_ms = frame.retry_after_ms
                message.row_failed.message = frame.message
        return seal(message)

    def decode(self, data: bytes, rows: Sequence[HandoffRow], pool: ReadablePool | None = None) -> Frame:
        """Returns the frame in `data`, which belongs to a call with these `rows`.

        `pool` is the sender's pool, if segments may be lent from it. Raises ProtocolError, which names the field, for
        an invalid frame, and FingerprintMismatch if the sender has another fingerprint.
        """
        most_fields = _FIELDS_A_ROW * len(rows) + _OTHER_FIELDS
        message, payload = unseal(prefill_pb2.HandoffFrame, data, most_fields=most_fields)
        kind = message.WhichOneof("frame")
        require(kind == "kv_segment" or not len(payload), "payload", "is no segment's")
        match kind:
            case "accepted":
                return self._decode_accepted(message.accepted)
            case "kv_segment":
                return decode_segment(message.kv_segment, payload, groups=self._groups, rows=rows, pool=pool)
            case "row_logprobs":
                return decode_row_logprobs(message.row_logprobs, rows=rows, vocab_size=self._vocab_size)
            case "prebuilt_batch":
                return decode_prebuilt(
                    message.prebuilt_batch,
                    group_names=tuple(self._groups),
                    seed_columns=self._fingerprint.seed_columns,
                    rows=rows,
                    vocab_size=self._vocab_size,
                )
            case "row_failed":
                return _decode_row_failed(message.row_failed, rows)
            case _:
                raise ProtocolError("frame", "is none of the known kinds")

    def _decode_accepted(self, message: prefill_pb2.Accepted) -> Accepted:
        require(message.HasField("fingerprint"), "accepted.fingerprint", "is absent")
        require(bool(message.instance_id), "accepted.instance_id", "is empty")
        difference = first_difference(self._fingerprint, decode_fingerprint(message.fingerprint))
        if difference is not None:
            raise FingerprintMismatch(*difference)
        return Accepted(instance_id=peer_text(message.instance_id))


def _decode_row_failed(message: prefill_pb2.RowFailed, rows: Sequence[HandoffRow]) -> RowFailed:
    require(message.row < len(rows), "row_failed.row", f"{message.row} is not one of the call's {len(rows)} rows")
    # Enums are open on the wire: the number may have no name.
    value = prefill_pb2.RowFailure.DESCRIPTOR.values_by_number.get(message.reason)
    name = value.name.removeprefix("ROW_FAILURE_") if value is not None else ""
    require(name in RowFailure.__members__, "row_failed.reason", f"{message.reason} is none of the known reasons")
    return RowFailed(
        row=message.row,
        reason=RowFailure(name),
        retryable=message.retryable,
        retry_after_ms=message.retry_after_ms,
        message=peer_text(message.message),
    )
