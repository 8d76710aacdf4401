"""Checks rows before the engine gets them, and renumbers the accepted rows if others were refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from common.errors import InvalidRequest, RowFailure
from common.grammar.grammar import TokenRules
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, PrebuiltBatch, RowFailed, RowLogprobs


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The limits of the served model and of its engine, which keeps the KV of up to `max_cached_tokens` for later
    rows.
    """

    vocab_size: int
    max_context_tokens: int
    max_cached_tokens: int = 0


def check_row(
    index: int, row: HandoffRow, limits: ReplicaLimits, *, group_names: Collection[str]
) -> HandoffRow | RowFailed:
    """Checks one row. Returns the row, or a RowFailed that says why this model cannot compute it.

    `group_names` are the names of the model's layer groups.
    Only a row that is too long is retryable, because a replica's limit depends on its memory.
    """
    num_tokens = len(row.token_ids)
    if num_tokens > limits.max_context_tokens:
        message = f"{num_tokens} tokens exceed the {limits.max_context_tokens} that this prefill service takes"
        return RowFailed(row=index, reason=RowFailure.CONTEXT_EXCEEDED, retryable=True, message=message)
    if row.num_held_tokens and {name for name, _ in row.num_held_tokens} != set(group_names):
        return invalid_row(index, f"num_held_tokens: does not name the layer groups {', '.join(sorted(group_names))}")
    sampling, rules = row.sampling, row.sampling.token_rules or TokenRules()
    ids = (*row.token_ids, *sampling.stop_token_ids, *sampling.eos_token_ids, *rules.allowed_ids[-1:])
    more_ids = (token_id for token_id, _ in sampling.logit_bias), *rules.forbidden
    largest = max(chain(ids, *more_ids))
    if largest >= limits.vocab_size:
        return invalid_row(index, f"token id {largest} is not below the vocabulary's {limits.vocab_size}")
    for name in ("num_logprobs", "num_prompt_logprobs"):
        if ((num_top := getattr(row.sampling, name)) or 0) > limits.vocab_size:
            return invalid_row(index, f"{name}: {num_top} exceed the vocabulary's {limits.vocab_size}")
    return row


def invalid_row(index: int, message: str) -> RowFailed:
    return RowFailed(row=index, reason=RowFailure.INVALID_ROW, retryable=False, message=message)


def unmatched_row(index: int, error: InvalidRequest) -> RowFailed:
    """Returns the failure of a row whose grammar or token rules are refused, or whose output so far is against them."""
    if error.field == "generated_token_ids":  # a defect: the decode service has checked it
        return invalid_row(index, str(error))
    return RowFailed(row=index, reason=RowFailure.CONSTRAINT, retryable=False, message=error.message)


def no_room_for_row(index: int, message: str) -> RowFailed:
    return RowFailed(row=index, reason=RowFailure.CAPACITY, retryable=True, message=message)


class RowNumbering:
    """Translates row numbers between a Handoff call and the engine. The call's frames and commands count all its rows;
    the engine counts only the accepted ones.
    """

    def __init__(self, rows: Sequence[HandoffRow | RowFailed]) -> None:
        self.num_rows = len(rows)
        self.refused = tuple(row for row in rows if isinstance(row, RowFailed))
        self.accepted = tuple(row for row in rows if isinstance(row, HandoffRow))
        self._call_rows = [index for index, row in enumerate(rows) if isinstance(row, HandoffRow)]
        self._engine_rows = {call_row: engine_row for engine_row, call_row in enumerate(self._call_rows)}

    def call_row(self, engine_row: int) -> int:
        return self._call_rows[engine_row]

    def row(self, call_row: int) -> HandoffRow:
        """Returns the row with this number in the call. It must be an accepted row."""
        return self.accepted[self._engine_rows[call_row]]

    def for_engine(self, call_rows: Sequence[int]) -> tuple[int, ...]:
        """Translates the call's row numbers to the engine's. Refused rows are left out, because they have ended."""
        return tuple(self._engine_rows[row] for row in call_rows if row in self._engine_rows)

    def for_call(self, frame: Frame) -> Frame:
        if not self.refused:
            return frame
        match frame:
            case KvSegment() | RowLogprobs() | RowFailed():
                return replace(frame, row=self._call_rows[frame.row])
            case PrebuiltBatch():
                return replace(frame, rows=np.array(self._call_rows, np.int64)[frame.rows])
            case Accepted():
                return frame
