"""One Handoff call on the prefill side: the frames on their way from the engine to the gRPC stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from common.errors import BatonError
from common.rpc.messages import ProtocolError, require
from common.wire.handoff import Frame, KvSegment, RowLogprobs
from prefill_service.edge.row_checks import RowNumbering
from prefill_service.edge.row_traces import RowTraces
from prefill_service.messages import CallDone, ChunkComputed, Event, FrameReady, RowStarted

CallError = BatonError | ProtocolError


class HandoffCall:
    """The frames of one Handoff call that the engine emitted and gRPC has not taken. For the event loop only.

    The engine's send budget bounds their memory, because a frame returns its bytes only when gRPC takes it.
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
        """Takes back lent segments that the receiver has read in this service's pool. `numbers` are their numbers.

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

        A lent segment is one that the receiver reads in this service's pool. If the call ended earlier, the receiver
        would take it that its reads are no longer expected. Raises the error that the call failed with. Raises
        TimeoutError if there is no frame and the receiver returns no lent segment for `stall_timeout_s`.
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
