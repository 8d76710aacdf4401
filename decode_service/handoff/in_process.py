"""The handoff to a prefill engine in the same process, with the same contract but without a network."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from common.errors import BatonError, EngineFault, PrefillUnavailable
from common.wire.handoff import Accepted, Frame, HandoffRow, KvSegment, unsent_bytes
from decode_service.handoff.receive_budget import ReceiveBudget
from decode_service.handoff.transport import Post
from decode_service.messages import (
    BreakCall,
    CallEnded,
    CancelHandoffRows,
    FrameArrived,
    Replica,
    ReplicasChanged,
    SegmentsLanded,
    StartHandoff,
)


class PrefillPort(Protocol):
    """The interface through which InProcessTransport calls the prefill engine. No method blocks."""

    def open_call(self, call_id: str, rows: tuple[HandoffRow, ...]) -> None: ...

    def cancel(self, call_id: str, rows: tuple[int, ...]) -> None: ...

    def close(self, call_id: str) -> None:
        """Ends a Handoff call. The engine sends no further frame of it, and frees the send budget that it still holds:
        the transport no longer calls `sent` for these bytes.
        """

    def sent(self, call_id: str, num_bytes: int) -> None: ...


class _Call:
    """The frames of one call that the decode engine has not received yet, in order."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.is_done = False


class InProcessTransport:
    """A HandoffTransport whose only replica is a prefill engine in this process.

    That engine keeps the KV of up to `max_cached_tokens` for later rows. It reports by calling `frame_ready`,
    `call_done` and `peer_lost`. Frames wait here while the receive budget is full. The engine's send budget bounds how
    many, because a frame counts as sent only after it was posted to the decode engine.
    """

    def __init__(
        self,
        *,
        post: Post,
        prefill: PrefillPort,
        address: str,
        receive_budget_bytes: int,
        max_cached_tokens: int = 0,
    ) -> None:
        self._post = post
        self._prefill = prefill
        self._address = address
        self._max_cached_tokens = max_cached_tokens
        # Reentrant: a prefill engine may answer within a call to it.
        self._lock = threading.RLock()
        self._budget = ReceiveBudget(receive_budget_bytes)
        self._calls: dict[str, _Call] = {}
        self._lost: BatonError | None = PrefillUnavailable("the in-process handoff is not open")

    async def open(self) -> None:
        with self._lock:
            self._lost = None
            ready = Replica(
                self._address, is_ready=True, instance_id=self._address, max_cached_tokens=self._max_cached_tokens
            )
            self._post(ReplicasChanged((ready,)))

    def start(self, command: StartHandoff) -> None:
        with self._lock:
            lost = self._lost
            if lost is None and command.replica != self._address:
                lost = PrefillUnavailable(f"{command.replica} is not a replica")
            if lost is not None:
                self._post(CallEnded(command.call_id, lost))
                return
            self._calls[command.call_id] = _Call()
            self._post(FrameArrived(command.call_id, Accepted(instance_id=self._address)))
            self._prefill.open_call(command.call_id, command.rows)

    def cancel_rows(self, command: CancelHandoffRows) -> None:
        with self._lock:
            if command.call_id in self._calls:
                self._prefill.cancel(command.call_id, command.rows)

    def break_call(self, command: BreakCall) -> None:
        with self._lock:
            self._break(command.call_id, EngineFault(f"the call was broken: {command.reason}"))
            self._hand_over_waiting()

    def landed(self, command: SegmentsLanded) -> None:
        with self._lock:
            self._budget.give_back(command.num_bytes)
            self._hand_over_waiting()

    async def close(self) -> None:
        self._lose(PrefillUnavailable("the in-process handoff is closed"))

    def frame_ready(self, call_id: str, frame: Frame) -> None:
        """Takes the next frame of a call from the prefill engine. A frame of a closed call is dropped.

        Any thread may call it.
        """
        with self._lock:
            if (call := self._calls.get(call_id)) is not None:
                call.frames.append(frame)
                self._hand_over(call_id)

    def call_done(self, call_id: str) -> None:
        """Ends a call whose rows have all ended. CallEnded is posted after its last frame. Any thread may call it."""
        with self._lock:
            if (call := self._calls.get(call_id)) is not None:
                call.is_done = True
                self._hand_over(call_id)

    def peer_lost(self, reason: str) -> None:
        """Ends every call, because the prefill engine died. Any thread may call it."""
        self._lose(PrefillUnavailable(reason))

    def _hand_over(self, call_id: str) -> None:
        """Posts the call's frames in order, up to the first segment for which the budget has no room."""
        call = self._calls[call_id]
        while call.frames:
            frame = call.frames[0]
            if isinstance(frame, KvSegment) and not self._budget.try_take(call_id, frame.num_bytes):
                return
            call.frames.popleft()
            self._post(FrameArrived(call_id, frame))
            if num_bytes := unsent_bytes(frame):
                self._prefill.sent(call_id, num_bytes)
        if call.is_done:
            del self._calls[call_id]
            self._post(CallEnded(call_id, None))

    def _hand_over_waiting(self) -> None:
        while (call_id := self._budget.next_waiting) is not None:
            self._hand_over(call_id)
            if self._budget.next_waiting == call_id:
                return

    def _break(self, call_id: str, error: BatonError) -> None:
        if self._calls.pop(call_id, None) is not None:
            self._budget.forget(call_id)
            self._prefill.close(call_id)
            self._post(CallEnded(call_id, error))

    def _lose(self, error: BatonError) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
            self._post(ReplicasChanged((Replica(self._address, is_ready=False, error=error),)))
            for call_id in list(self._calls):
                self._break(call_id, error)
