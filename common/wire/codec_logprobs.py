"""Converts a RowLogprobs to its `baton.v1` message and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.v1 import prefill_pb2
from common.rpc.messages import require
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.handoff import HandoffRow, RowLogprobs


def encode_row_logprobs(frame: RowLogprobs, into: prefill_pb2.RowLogprobs) -> None:
    """Writes `frame` into the message `into`."""
    logprobs = frame.logprobs
    into.row, into.start = frame.row, logprobs.start
    into.logprobs.extend(logprobs.logprobs.tolist())
    into.ranks.extend(logprobs.ranks.tolist())
    into.top_token_ids.extend(logprobs.top_ids.ravel().tolist())
    into.top_logprobs.extend(logprobs.top_values.ravel().tolist())


def decode_row_logprobs(
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
