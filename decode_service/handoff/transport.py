"""The interface between the decode engine and prefill replicas, which it reaches over gRPC.

engine ──start, cancel_rows, break_call, landed──▶ transport ──▶ replica
engine ◀─────── post(FrameArrived | CallEnded | ReplicasChanged) ─────── transport
"""

from __future__ import annotations

from collections.abc import Callable
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

TransportReport = FrameArrived | CallEnded | ReplicasChanged
Post = Callable[[TransportReport], None]


class HandoffTransport(Protocol):
    """Carries Handoff calls between the engine and the replicas. It reports through the function `post` that it was
    created with.

    Any thread may call its methods, except `open` and `close`; none of them blocks. For each `start` it posts, in this
    order: FrameArrived with Accepted, FrameArrived for each further frame in the replica's order, and exactly one
    CallEnded. For a call that fails early it posts only CallEnded.

    Receive budget: over all calls, the payload bytes of segments posted and not yet `landed` stay within
    `receive_budget_bytes`, except that one segment is always allowed. While the budget is full, a call reads only its
    next frame, and then the replica must stop sending. The engine calls `landed` for every segment posted, even if it
    drops the segment or the call has ended; only `landed` gives bytes back.

    A call ends when its replica ends it, is lost, or sends nothing for as long as the time-outs allow. The error in
    CallEnded is None after an orderly end. Otherwise it is FingerprintMismatch, PrefillUnavailable or EngineFault (the
    protocol was broken). PrefillUnavailable means that the replica was lost, refused or stalled, and that another may
    serve the rows. Before such a CallEnded, a ReplicasChanged reports the replica as not ready.
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
