"""The interface through which the decode engine reaches prefill replicas, and its time-outs.

engine ──start, cancel_rows, break_call, landed──▶ transport ──▶ replica
engine ◀─────── post(FrameArrived | CallEnded | ReplicasChanged) ─────── transport
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from decode_service.messages import (
    BreakCall,
    CallEnded,
    CancelHandoffRows,
    FrameArrived,
    ReplicasChanged,
    SegmentsLanded,
    StartHandoff,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimeouts:
    """Time-outs and intervals of the handoff, in seconds.

    A call is lost if it has no connection within `connect_timeout_s`, no head of an answer within `answer_timeout_s`
    after that, no Accepted frame within further `accept_timeout_s`, or no further frame within `progress_timeout_s`.
    Each replica is polled every `poll_interval_s`; a request of a poll fails after `poll_timeout_s`. Each DNS name is
    looked up every `look_up_interval_s`; a look-up fails after `look_up_timeout_s`. Each NIXL operation (reading a
    segment, or starting the process) fails after `nixl_timeout_s`. After a failure the pool is opened again after
    `pool_retry_s`, a wait that doubles with each failure in a row. Closing waits for at most `close_timeout_s`.
    """

    connect_timeout_s: float = 2.0
    answer_timeout_s: float = 2.5
    accept_timeout_s: float = 10.0
    progress_timeout_s: float = 120.0
    poll_interval_s: float = 0.5
    poll_timeout_s: float = 2.0
    look_up_interval_s: float = 2.0
    look_up_timeout_s: float = 5.0
    nixl_timeout_s: float = 10.0
    pool_retry_s: float = 5.0
    close_timeout_s: float = 5.0

    @classmethod
    def of_progress(cls, timeout_s: float) -> HandoffTimeouts:
        """Returns time-outs whose `progress_timeout_s` is `timeout_s`.

        `accept_timeout_s` and `nixl_timeout_s` are the same, but 10 s at most, and `answer_timeout_s` 2.5 s at most:
        none of them waits for the replica's engine.
        """
        short_s = min(10.0, timeout_s)
        return cls(
            answer_timeout_s=min(2.5, timeout_s),
            accept_timeout_s=short_s,
            nixl_timeout_s=short_s,
            progress_timeout_s=timeout_s,
        )


TransportReport = FrameArrived | CallEnded | ReplicasChanged
Post = Callable[[TransportReport], None]


class HandoffTransport(Protocol):
    """Carries Handoff calls between the engine and the replicas. It reports through the function `post` that it was
    created with.

    Any thread may call its methods, except `open` and `close`; none of them blocks. For each `start` it posts, in this
    order: FrameArrived with Accepted, FrameArrived for each further frame in the replica's order, and exactly one
    CallEnded. For a call that fails early it posts only CallEnded, or before that, if the replica is full, RowFailed of
    each row.

    Receive budget: over all calls, the payload bytes of segments posted and not yet `landed` stay within
    `receive_budget_bytes`; while none are held, one segment may have more. While the budget is full, a call reads only
    its next frame, and then the replica must stop sending. The engine calls `landed` for every segment posted, even if
    it drops the segment or the call has ended; only `landed` gives bytes back.

    A call ends when its replica ends it, is lost, or sends nothing for as long as the time-outs allow. The error in
    CallEnded is None after an orderly end. Otherwise it is FingerprintMismatch, PrefillUnavailable or EngineFault (the
    replica broke the protocol, or the engine the call). PrefillUnavailable means that the replica was lost, stalled or
    refused the call, and that another may serve the rows. Unless the transport closes, a ReplicasChanged reports the
    replica as not ready before a CallEnded with PrefillUnavailable or FingerprintMismatch.
    """

    async def open(self) -> None:
        """Begins to watch the replicas, without waiting for any. Posts ReplicasChanged soon and at each change."""

    def start(self, command: StartHandoff) -> None:
        """Opens a call. Its `call_id` must be new. If the replica is not ready, the call ends at once."""

    def cancel_rows(self, command: CancelHandoffRows) -> None:
        """Tells the replica to drop rows. Frames of them may still arrive. An unknown or ended call is ignored."""

    def break_call(self, command: BreakCall) -> None:
        """Cancels the call; CallEnded follows with an EngineFault. An unknown or ended call is ignored."""

    def landed(self, command: SegmentsLanded) -> None:
        """Gives the bytes of landed segments back to the receive budget."""

    async def close(self) -> None:
        """Ends every call, each with its CallEnded, and releases the transport's resources, within a bounded time."""
