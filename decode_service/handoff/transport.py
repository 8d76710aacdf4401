"""The seam between the decode engine and the prefill replicas: gRPC, or a prefill engine in the same process.

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
    """Carries Handoff calls. Built with a `Post`; every method but `open` and `close` is for any thread; none blocks.

    For each `start`, these are posted in this order, and nothing else of the call: FrameArrived with Accepted, further
    FrameArrived in the order the replica sent them, exactly one CallEnded. A call that fails early has CallEnded alone.

    Receive budget: the payload bytes of segments posted and not yet `landed`, over all calls, stay within
    `receive_budget_bytes`, except that one segment is always allowed. While the budget is full a call reads no frame
    but the next, and the replica's sending stops. The engine answers `landed` for every segment posted, those it drops
    and those of ended calls included; only `landed` gives bytes back.

    An error in CallEnded is FingerprintMismatch, PrefillUnavailable (the replica was lost, refused or stalled: another
    may serve the rows; ReplicasChanged without it came before) or EngineFault (the protocol was broken). No call
    outlives the loss of its replica, nor a replica that sends nothing for the transport's time-outs.
    """

    async def open(self) -> None:
        """Begin to watch the replicas: ReplicasChanged follows, and again at each change. Waits for none of them."""

    def start(self, command: StartHandoff) -> None:
        """Open a call. Its `call_id` is new. To a replica that is not ready, the call ends at once."""

    def cancel_rows(self, command: CancelHandoffRows) -> None:
        """Tell the replica. Frames of the rows may still arrive; an unknown or ended call is ignored."""

    def break_call(self, command: BreakCall) -> None:
        """Cancel the call; CallEnded follows with an EngineFault. An unknown or ended call is ignored."""

    def landed(self, command: SegmentsLanded) -> None:
        """Give bytes back to the receive budget."""

    async def close(self) -> None:
        """End every call, each with its CallEnded, and release what the transport holds. Bounded in time."""
