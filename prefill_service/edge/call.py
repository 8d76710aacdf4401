"""One Handoff call on the prefill side: the checks of its rows before the engine gets them, the engine's numbers for
them, and the frames on their way from the engine to the gRPC stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from common.errors import BatonError, InvalidRequest, RowFailure
from common.grammar.grammar import TokenRules
from common.rpc.messages import ProtocolError, require
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, PrebuiltBatch, RowFailed, RowLogprobs
from prefill_service.edge.observer import RowTraces
from prefill_service.messages import CallDone, ChunkComputed, Event, FrameReady, RowStarted

CallError = BatonError | ProtocolError


class HandoffCall:
    """The frames of one Handoff call that the engine emitted and gRPC has not taken. For the event loop only.

    The engine's send budget bounds their memory: a frame's bytes return to it only when gRPC takes the frame.
    """

    def __init__(self, call_id: str, numbering: RowNumbering, traces: RowTraces) -> None:
        self.call_id = call_id
        self.numbering = numbering
        self.traces = traces
        self._frames: deque[Frame] = deque()
        self._cancelled: set[int] = set()
        self._lent: set[int] = set()
        self._is_done = False
        self._error: CallError | None = None
        self._changed = asyncio.Event()

    def take(self, event: Event) -> Sequence[Frame]:
        """Takes an event of the engine. A frame in it is queued for `next_frame`.

        KV and log-probabilities of a cancelled row are not sent: their frame is returned instead. In all other cases
        the result is empty.
        """
        match event:
            case FrameReady(_, frame):
                frame = self.numbering.for_call(frame)
                if self._is_cancelled(frame):
                    return (frame,)
                self._frames.append(frame)
            case CallDone():
                self._is_done = True
            case RowStarted(row=row) | ChunkComputed(row=row):
                self.traces.on_event(self.numbering.call_row(row), event)
                return ()
        self._changed.set()
        return ()

    def cancel(self, rows: Iterable[int]) -> Sequence[Frame]:
        """Cancels the rows with these numbers in the call: no further KV or log-probabilities of them are sent.

        Returns the frames that waited here and are dropped.
        """
        rows = tuple(rows)
        self._cancelled.update(rows)
        self.traces.on_cancelled(rows)
        dropped = [frame for frame in self._frames if self._is_cancelled(frame)]
        self._frames = deque(frame for frame in self._frames if not self._is_cancelled(frame))
        return dropped

    def release(self, numbers: Sequence[int]) -> None:
        """Takes back lent segments that the receiver has read in this service's pool. `numbers` are their ticket
        numbers.

        Raises ProtocolError if one of them is not lent to the call.
        """
        for number in numbers:
            require(number in self._lent, "release_segments.numbers", f"{number} is not lent to the call")
            self._lent.discard(number)
        self._changed.set()

    def fail(self, error: CallError) -> None:
        """Ends the call with `error`; frames that still wait are not sent. If called again, the first error stays."""
        self._error = self._error or error
        self._changed.set()

    async def next_frame(self, stall_timeout_s: float) -> Frame | None:
        """Waits for the next frame to write. Returns None when the engine has ended the call and every lent segment is
        back.

        A lent segment is one that the receiver reads in this service's pool, and gives back in this call. So the call
        must not end before. Raises the error that the call failed with. While segments are lent, raises TimeoutError if
        for `stall_timeout_s` there is no frame and no segment is given back.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._frames:
                frame = self._frames.popleft()
                if isinstance(frame, KvSegment) and frame.shared is not None:
                    self._lent.add(frame.shared.ticket.number)
                return frame
            if self._is_done and not self._lent:
                return None
            self._changed.clear()
            async with asyncio.timeout(stall_timeout_s if self._lent else None):
                await self._changed.wait()

    def _is_cancelled(self, frame: Frame) -> bool:
        return isinstance(frame, KvSegment | RowLogprobs) and frame.row in self._cancelled


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The limits of the served model and of its engine, which keeps the KV of up to `max_cached_tokens` tokens for
    later rows.
    """

    vocab_size: int
    max_context_tokens: int
    max_cached_tokens: int = 0


def check_row(
    index: int, row: HandoffRow, limits: ReplicaLimits, *, group_names: Collection[str]
) -> HandoffRow | RowFailed:
    """Checks one row. Returns the row, or a RowFailed that says why this model cannot compute it.

    `group_names` are the names of the model's layer groups. Only a row that is too long may be retried, because another
    replica may have more memory.
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
    """Returns the failure of a row whose grammar or token rules are refused, or whose output so far breaks them."""
    if error.field == "generated_token_ids":  # a defect: the decode service has checked it
        return invalid_row(index, str(error))
    return RowFailed(row=index, reason=RowFailure.CONSTRAINT, retryable=False, message=error.message)


def no_room_for_row(index: int, message: str) -> RowFailed:
    return RowFailed(row=index, reason=RowFailure.CAPACITY, retryable=True, message=message)


def uncomputed_row(index: int, message: str) -> RowFailed:
    return RowFailed(row=index, reason=RowFailure.COMPUTE, retryable=True, message=message)


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
