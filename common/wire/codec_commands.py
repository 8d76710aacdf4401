"""Encodes the commands of a handoff call as bytes of `baton.v1.HandoffCommand`, and decodes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import prefill_pb2
from common.errors import RowFailure
from common.rpc.messages import ProtocolError, require
from common.wire.codec_fingerprint import decode_fingerprint, encode_fingerprint
from common.wire.codec_rows import decode_row, encode_row
from common.wire.fingerprint import Fingerprint
from common.wire.framing import seal, unseal
from common.wire.handoff import MAX_CALL_ROWS, MAX_ROW_TOKENS, HandoffRow, RowFailed

_FIELDS_A_ROW = 64
"""The most protobuf fields per row. A row with its sampling has about 25, and a few for each layer group."""
_OTHER_FIELDS = 1024
"""The most protobuf fields besides rows: enough for a fingerprint of 64 layer groups and seed columns."""
_MAX_HELD_GROUPS = 16
_MAX_ENTRIES = 65_536
"""The most entries of the other lists of a row. `decode_row` then checks the exact limit of each list."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The first command of a Handoff call: rows to prefill.

    If the receiver cannot decode a row, `rows` has a RowFailed in its place, and the other rows are prefilled.
    `pool_secret` is what the decode service has read at the start of the prefill service's KV pool, which proves that
    it can read there. It is empty if it cannot.
    """

    fingerprint: Fingerprint
    rows: tuple[HandoffRow | RowFailed, ...]
    pool_secret: bytes = b""


@dataclass(frozen=True, slots=True)
class CancelRows:
    """The command to cancel rows of its Handoff call, given by their index in the call."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseSegments:
    """The command that gives lent KV segments back to the prefill service, whose pool holds them.

    `numbers` has the number of each segment's ticket.
    """

    numbers: tuple[int, ...]


HandoffCommand = PrefillBatch | CancelRows | ReleaseSegments


def encode_prefill_batch(fingerprint: Fingerprint, rows: Sequence[HandoffRow], *, pool_secret: bytes = b"") -> bytes:
    """Returns the bytes of the command to prefill `rows`. PrefillBatch explains `pool_secret`."""
    batch = prefill_pb2.PrefillBatch(
        fingerprint=encode_fingerprint(fingerprint),
        rows=[encode_row(row) for row in rows],
        pool_secret=pool_secret,
    )
    return seal(prefill_pb2.HandoffCommand(prefill_batch=batch))


def encode_cancel_rows(rows: Sequence[int]) -> bytes:
    """Returns the bytes of the command to cancel rows, given by index."""
    return seal(prefill_pb2.HandoffCommand(cancel_rows=prefill_pb2.CancelRows(rows=rows)))


def encode_release_segments(numbers: Sequence[int]) -> bytes:
    """Returns the bytes of the command that gives lent KV segments back. `numbers` are the segments' ticket numbers."""
    return seal(prefill_pb2.HandoffCommand(release_segments=prefill_pb2.ReleaseSegments(numbers=numbers)))


def decode_command(data: bytes, *, max_rows: int = MAX_CALL_ROWS) -> HandoffCommand:
    """Returns the command in `data`.

    Raises ProtocolError, which names the field, if the command is invalid; if it has too many fields, it is not parsed.
    Raises FingerprintMismatch for a PrefillBatch of another protocol version.
    """
    most_fields = _FIELDS_A_ROW * max_rows + _OTHER_FIELDS
    message, payload = unseal(prefill_pb2.HandoffCommand, data, most_fields=most_fields)
    require(not len(payload), "payload", "is no command's")
    match message.WhichOneof("command"):
        case "prefill_batch":
            batch = message.prefill_batch
            require(batch.HasField("fingerprint"), "prefill_batch.fingerprint", "is absent")
            require(len(batch.rows) > 0, "prefill_batch.rows", "is empty")
            _require_at_most(max_rows, "prefill_batch.rows", len(batch.rows))
            for index, row in enumerate(batch.rows):
                _require_short_lists(f"prefill_batch.rows[{index}]", row)
            return PrefillBatch(
                fingerprint=decode_fingerprint(batch.fingerprint),
                rows=tuple(_decode_row(index, row) for index, row in enumerate(batch.rows)),
                pool_secret=batch.pool_secret,
            )
        case "cancel_rows":
            cancel = message.cancel_rows
            _require_at_most(max_rows, "cancel_rows.rows", len(cancel.rows))
            return CancelRows(rows=tuple(cancel.rows))
        case "release_segments":
            release = message.release_segments
            require(len(release.numbers) > 0, "release_segments.numbers", "is empty")
            _require_at_most(_MAX_ENTRIES, "release_segments.numbers", len(release.numbers))
            return ReleaseSegments(numbers=tuple(release.numbers))
        case _:
            raise ProtocolError("command", "is none of the known kinds")


def _require_at_most(limit: int, field: str, number: int) -> None:
    """Raises ProtocolError if a list has more entries than `limit`."""
    require(number <= limit, field, f"has {number}, more than {limit}")


def _require_short_lists(path: str, row: prefill_pb2.PrefillRow) -> None:
    """Raises ProtocolError if a list of the row is too long to be read at all.

    The model's own limit of token ids is checked later.
    """
    _require_at_most(MAX_ROW_TOKENS, f"{path}.token_ids", len(row.token_ids))
    _require_at_most(_MAX_HELD_GROUPS, f"{path}.num_held_tokens", len(row.num_held_tokens))
    params = row.sampling.params
    lists = {"stop_token_ids": params.stop_token_ids, "eos_token_ids": row.sampling.eos_token_ids}
    lists |= {name: getattr(row.sampling, name) for name in ("logit_bias_ids", "logit_bias_values")}
    for name, entries in lists.items():
        _require_at_most(_MAX_ENTRIES, f"{path}.sampling.{name}", len(entries))


def _decode_row(index: int, message: prefill_pb2.PrefillRow) -> HandoffRow | RowFailed:
    """Returns the row, or a RowFailed if it is invalid."""
    try:
        return decode_row(message)
    except ProtocolError as error:
        return RowFailed(row=index, reason=RowFailure.INVALID_ROW, retryable=False, message=str(error))
