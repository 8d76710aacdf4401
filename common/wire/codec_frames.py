"""Encodes the frames of a handoff call as bytes of `baton.v1.HandoffFrame`, and decodes them.

Frames are the messages that a prefill service sends to a decode service: segments of KV, first tokens,
log-probabilities of prompts, and failures. Columns of first tokens are converted as a whole. There is a Python loop
over rows only for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.errors import FingerprintMismatch, RowFailure
from common.kv.layer_group import LayerGroupSpec, SeedColumnSpec
from common.kv.shared_kv import MAX_LENT_BYTES, PoolTicket, ReadablePool, RemoteKv, SharedKv, runs_of, slots_of
from common.peer_text import peer_text
from common.rpc.grpc_options import MAX_SEGMENT_BYTES
from common.rpc.messages import ProtocolError, require
from common.sampling.params import TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.codec_fingerprint import decode_fingerprint, encode_fingerprint
from common.wire.fingerprint import Fingerprint, first_difference
from common.wire.framing import seal, unseal
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, PrebuiltBatch, RowFailed, RowLogprobs

SEED_COLUMN_NAMES = ("topk_p", "topk_index", "hidden_states")
_COLUMN_DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # the bits, because numpy has no bfloat16
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
}
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
                _encode_segment(frame, message.kv_segment)
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
                return _decode_segment(message.kv_segment, payload, groups=self._groups, rows=rows, pool=pool)
            case "row_logprobs":
                return _decode_row_logprobs(message.row_logprobs, rows=rows, vocab_size=self._vocab_size)
            case "prebuilt_batch":
                return _decode_prebuilt(
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


def _encode_segment(segment: KvSegment, into: prefill_pb2.KvSegment) -> None:
    """Writes `segment` into the message `into`, without the payload, which is sent in front of it."""
    into.row = segment.row
    into.layer_group = segment.layer_group
    into.layer_start = segment.layer_start
    into.num_layers = segment.num_layers
    into.token_start = segment.token_start
    into.num_tokens = segment.num_tokens
    into.num_shards = 1
    if segment.shared is not None:
        ticket = segment.shared.ticket
        starts, lengths = runs_of(ticket.slots)
        into.ticket.run_starts.extend(starts)
        into.ticket.run_lengths.extend(lengths)
        into.ticket.generation, into.ticket.number = ticket.generation, ticket.number


def _decode_segment(
    message: prefill_pb2.KvSegment,
    payload: NDArray[np.uint8],
    *,
    groups: Mapping[str, LayerGroupSpec],
    rows: Sequence[HandoffRow],
    pool: ReadablePool | None,
) -> KvSegment:
    """Returns the segment in `message`, after it has checked every bound.

    `rows` are the rows of the call. `pool` is the sender's pool, from which a segment with a ticket is read; None if
    this process cannot read it. Raises ProtocolError, which names the field.
    """
    require(message.row < len(rows), "kv_segment.row", f"{message.row} is not one of the call's {len(rows)} rows")
    require((message.shard, message.num_shards) == (0, 1), "kv_segment.shard", "is not shard 0 of 1")
    group = groups.get(message.layer_group)
    if group is None:
        raise ProtocolError("kv_segment.layer_group", f"{message.layer_group!r} is not in the fingerprint")
    layer_end = message.layer_start + message.num_layers
    require(
        message.num_layers >= 1 and layer_end <= group.num_layers,
        "kv_segment.num_layers",
        f"layers {message.layer_start}..{layer_end} are not within the group's {group.num_layers}",
    )
    token_end, num_row_tokens = message.token_start + message.num_tokens, len(rows[message.row].token_ids)
    require(
        message.num_tokens >= 1 and token_end <= num_row_tokens,
        "kv_segment.num_tokens",
        f"tokens {message.token_start}..{token_end} are not within the row's {num_row_tokens}",
    )
    num_bytes = message.num_layers * group.num_planes * message.num_tokens * group.row_bytes
    shared = None
    if message.HasField("ticket"):
        require(not len(payload), "kv_segment.payload", "comes with a ticket")
        require(num_bytes <= MAX_LENT_BYTES, "kv_segment.ticket", f"is of {num_bytes} bytes, over {MAX_LENT_BYTES}")
        layers = slice(message.layer_start, layer_end)
        shared = _shared(message.ticket, pool, group.name, layers, num_tokens=message.num_tokens)
    else:
        require(len(payload) <= MAX_SEGMENT_BYTES, "kv_segment.payload", f"has more than {MAX_SEGMENT_BYTES} bytes")
        require(len(payload) == num_bytes, "kv_segment.payload", f"has {len(payload)} bytes instead of {num_bytes}")
    return KvSegment(
        row=message.row,
        layer_group=message.layer_group,
        layer_start=message.layer_start,
        num_layers=message.num_layers,
        token_start=message.token_start,
        num_tokens=message.num_tokens,
        payload=payload,
        shared=shared,
    )


def _shared(
    message: prefill_pb2.PoolTicket, pool: ReadablePool | None, group_name: str, layers: slice, *, num_tokens: int
) -> SharedKv | RemoteKv:
    """Returns the KV to which a ticket refers. Raises ProtocolError if the ticket is invalid."""
    if pool is None:
        raise ProtocolError("kv_segment.ticket", "is into memory that cannot be read")
    starts, lengths = message.run_starts, message.run_lengths
    require(
        len(starts) == len(lengths) <= num_tokens,
        "kv_segment.ticket",
        f"has {len(starts)} starts and {len(lengths)} lengths of runs for {num_tokens} tokens",
    )
    require(0 not in lengths, "kv_segment.ticket", "has runs that are none")
    require(sum(lengths) == num_tokens, "kv_segment.ticket", f"has {sum(lengths)} slots instead of {num_tokens}")
    shared = pool.read(group_name, layers, PoolTicket(slots_of(starts, lengths), message.generation, message.number))
    if shared is None:
        raise ProtocolError("kv_segment.ticket", f"is of slots that {group_name} does not have in the pool")
    return shared


def encode_row_logprobs(frame: RowLogprobs, into: prefill_pb2.RowLogprobs) -> None:
    """Writes `frame` into the message `into`."""
    logprobs = frame.logprobs
    into.row, into.start = frame.row, logprobs.start
    into.logprobs.extend(logprobs.logprobs.tolist())
    into.ranks.extend(logprobs.ranks.tolist())
    into.top_token_ids.extend(logprobs.top_ids.ravel().tolist())
    into.top_logprobs.extend(logprobs.top_values.ravel().tolist())


def _decode_row_logprobs(
    message: prefill_pb2.RowLogprobs, *, rows: Sequence[HandoffRow], vocab_size: int
) -> RowLogprobs:
    """Returns the frame in `message`, which belongs to a call with these `rows`.

    Raises ProtocolError, which names the column, unless the message has what its row asked for.
    """
    require(message.row < len(rows), "row_logprobs.row", f"{message.row} is not one of the call's {len(rows)} rows")
    row = rows[message.row]
    num_top = row.sampling.num_prompt_logprobs
    require(num_top is not None, "row_logprobs.row", f"{message.row} asked for none")
    num_top, num_tokens = min(num_top or 0, vocab_size), len(message.logprobs)
    require(num_tokens > 0, "row_logprobs.logprobs", "is empty")
    last = row.prompt_len - num_tokens
    require(1 <= message.start <= last, "row_logprobs.start", f"{message.start} is not in 1..{last}")
    require(len(message.ranks) == num_tokens, "row_logprobs.ranks", f"does not have {num_tokens} entries")
    for name in ("top_token_ids", "top_logprobs"):
        num_entries = num_tokens * num_top
        require(
            len(getattr(message, name)) == num_entries, f"row_logprobs.{name}", f"does not have {num_entries} entries"
        )
    ranks = np.array(message.ranks, np.int64)
    require(bool(((ranks >= 1) & (ranks <= vocab_size)).all()), "row_logprobs.ranks", "has an impossible rank")
    top_ids = np.array(message.top_token_ids, np.int64).reshape(num_tokens, num_top)
    require(
        bool((top_ids < vocab_size).all()), "row_logprobs.top_token_ids", f"has an id that is not below {vocab_size}"
    )
    return RowLogprobs(
        message.row,
        PromptLogprobs(
            message.start,
            np.array(message.logprobs, np.float32),
            ranks,
            top_ids,
            np.array(message.top_logprobs, np.float32).reshape(num_tokens, num_top),
        ),
    )


def encode_prebuilt(batch: PrebuiltBatch, into: prefill_pb2.PrebuiltBatch) -> None:
    """Writes `batch` into the message `into`.

    Log-probabilities are sent as float32. A row that did not ask for any has an empty entry.
    """
    into.rows.extend(batch.rows.tolist())
    into.seq_lens.extend(batch.seq_lens.tolist())
    into.first_token_ids.extend(batch.first_token_ids.tolist())
    into.queue_s.extend(batch.queue_s.tolist())
    into.compute_s.extend(batch.compute_s.tolist())
    into.num_cached_tokens.extend(batch.num_cached_tokens.tolist())
    for group, num_bytes in batch.bytes_sent.items():
        into.bytes_sent.add(layer_group=group, bytes=num_bytes.tolist())
    if any(entry is not None for entry in batch.first_token_logprobs):
        for entry in batch.first_token_logprobs:
            into.first_token_logprobs.append(0.0 if entry is None else entry.chosen)
            top = into.top_logprobs.add()
            if entry is not None:
                top.token_ids.extend(entry.top_ids)
                top.logprobs.extend(entry.top_values)
    for name, column in batch.seed_columns.items():
        assert name in SEED_COLUMN_NAMES, name
        setattr(into, name, np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<")).tobytes())


def _decode_prebuilt(
    message: prefill_pb2.PrebuiltBatch,
    *,
    group_names: Sequence[str],
    seed_columns: Sequence[SeedColumnSpec],
    rows: Sequence[HandoffRow],
    vocab_size: int,
) -> PrebuiltBatch:
    """Returns the batch in `message`, after it has checked the length and the range of each column.

    `rows` are the rows of the call. Raises ProtocolError, which names the column.
    """
    num_rows = len(message.rows)
    require(num_rows > 0, "prebuilt_batch.rows", "is empty")
    require(num_rows <= len(rows), "prebuilt_batch.rows", f"has {num_rows} entries for the call's {len(rows)} rows")
    row_indices = _integers("rows", message.rows, num_rows, below=len(rows))
    require(len(np.unique(row_indices)) == num_rows, "prebuilt_batch.rows", "names a row twice")
    seq_lens = _integers("seq_lens", message.seq_lens, num_rows)
    row_lens = np.fromiter(map(_num_tokens, rows), np.int64, len(rows))[row_indices]
    require(bool((seq_lens == row_lens).all()), "prebuilt_batch.seq_lens", "is not the number of the row's token_ids")
    first_token_ids = _integers("first_token_ids", message.first_token_ids, num_rows, below=vocab_size)
    num_cached = _integers("num_cached_tokens", message.num_cached_tokens, num_rows)
    require(bool((num_cached <= row_lens).all()), "prebuilt_batch.num_cached_tokens", "is more than the row's tokens")
    return PrebuiltBatch(
        rows=row_indices,
        seq_lens=seq_lens,
        first_token_ids=first_token_ids,
        bytes_sent=_bytes_sent(message, group_names),
        queue_s=_durations("queue_s", message.queue_s, num_rows),
        compute_s=_durations("compute_s", message.compute_s, num_rows),
        num_cached_tokens=num_cached,
        first_token_logprobs=_logprobs(message, [rows[row] for row in message.rows], vocab_size),
        seed_columns=_seed_columns(message, seed_columns),
    )


def _num_tokens(row: HandoffRow) -> int:
    return len(row.token_ids)


def _require_length(name: str, length: int, num_rows: int) -> None:
    """Raises ProtocolError unless a column has one entry for each row."""
    require(length == num_rows, f"prebuilt_batch.{name}", f"has {length} entries for {num_rows} rows")


def _integers(name: str, values: Sequence[int], num_rows: int, below: int | None = None) -> NDArray[np.int64]:
    """Returns a column of integers, [num_rows] int64.

    Raises ProtocolError unless there is one for each row, and each is less than `below`, if that is not None. They
    cannot be negative, because the message's fields are unsigned.
    """
    _require_length(name, len(values), num_rows)
    column = np.fromiter(values, np.int64, num_rows)
    if below is not None:
        require(bool((column < below).all()), f"prebuilt_batch.{name}", f"has an entry that is not below {below}")
    return column


def _durations(name: str, values: Sequence[float], num_rows: int) -> NDArray[np.float64]:
    """Returns a column of seconds, [num_rows] float64.

    Raises ProtocolError unless there is one for each row, and each is finite and not negative.
    """
    _require_length(name, len(values), num_rows)
    column = np.fromiter(values, np.float64, num_rows)
    require(bool((np.isfinite(column) & (column >= 0)).all()), f"prebuilt_batch.{name}", "has an impossible duration")
    return column


def _bytes_sent(message: prefill_pb2.PrebuiltBatch, group_names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Returns the number of bytes of KV sent for each row, [rows] int64, by layer group.

    Raises ProtocolError unless each group has exactly one column with one entry for each row.
    """
    sent = {}
    for entry in message.bytes_sent:
        name = f"bytes_sent[{entry.layer_group}]"
        _require_length(name, len(entry.bytes), len(message.rows))
        column = np.fromiter(entry.bytes, np.uint64, len(message.rows))
        require(bool((column < 1 << 63).all()), f"prebuilt_batch.{name}", "has an entry beyond 63 bits")
        sent[entry.layer_group] = column.astype(np.int64)
    names = [entry.layer_group for entry in message.bytes_sent]
    require(
        sorted(names) == sorted(group_names),
        "prebuilt_batch.bytes_sent",
        f"has {names} instead of one entry for each of {list(group_names)}",
    )
    return sent


def _logprobs(
    message: prefill_pb2.PrebuiltBatch, rows: Sequence[HandoffRow], vocab_size: int
) -> tuple[TokenLogprobs | None, ...]:
    """Returns the first token's log-probabilities of each row, or None for a row that did not ask for them.

    Raises ProtocolError unless the message has what the rows asked for.
    """
    if all(row.sampling.num_logprobs is None for row in rows):
        require(not message.first_token_logprobs, "prebuilt_batch.first_token_logprobs", "was not asked for")
        require(not message.top_logprobs, "prebuilt_batch.top_logprobs", "was not asked for")
        return (None,) * len(rows)
    _require_length("first_token_logprobs", len(message.first_token_logprobs), len(rows))
    _require_length("top_logprobs", len(message.top_logprobs), len(rows))
    entries: list[TokenLogprobs | None] = []
    for row, chosen, top in zip(rows, message.first_token_logprobs, message.top_logprobs, strict=True):
        num_top = row.sampling.num_logprobs or 0
        same = len(top.token_ids) == len(top.logprobs) == min(num_top, vocab_size)
        require(same, "prebuilt_batch.top_logprobs", f"has an entry of other lengths than the {num_top} asked for")
        in_range = all(token_id < vocab_size for token_id in top.token_ids)
        require(in_range, "prebuilt_batch.top_logprobs", "has a token id out of range")
        asked = row.sampling.num_logprobs is not None
        entries.append(TokenLogprobs(chosen, tuple(top.token_ids), tuple(top.logprobs)) if asked else None)
    return tuple(entries)


def _seed_columns(
    message: prefill_pb2.PrebuiltBatch, specs: Sequence[SeedColumnSpec]
) -> dict[str, NDArray[np.generic]]:
    """Returns the columns of the draft seed by name, each [rows, ...].

    Raises ProtocolError unless they are the columns in `specs`, of the right size.
    """
    by_name = {spec.name: spec for spec in specs}
    data: Mapping[str, bytes] = {name: getattr(message, name) for name in SEED_COLUMN_NAMES}
    columns: dict[str, NDArray[np.generic]] = {}
    for name, column in data.items():
        spec = by_name.get(name)
        if spec is None:
            require(not column, f"prebuilt_batch.{name}", "is not in the fingerprint")
            continue
        dtype = _COLUMN_DTYPES[spec.dtype]
        num_bytes = len(message.rows) * prod(spec.row_shape) * dtype.itemsize
        require(len(column) == num_bytes, f"prebuilt_batch.{name}", f"has {len(column)} bytes instead of {num_bytes}")
        columns[name] = np.frombuffer(column, dtype).reshape(len(message.rows), *spec.row_shape).copy()
    return columns
