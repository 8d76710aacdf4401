"""Converts a PrebuiltBatch to its `baton.v1` message and back.

Whole columns are converted at once. There is a Python loop over rows only for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.kv.layer_group import SeedColumnSpec
from common.rpc.messages import require
from common.sampling.params import TokenLogprobs
from common.wire.handoff import HandoffRow, PrebuiltBatch

SEED_COLUMN_NAMES = ("topk_p", "topk_index", "hidden_states")
_COLUMN_DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # the bits, because numpy has no bfloat16
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
}


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


def decode_prebuilt(
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
