"""Routes the engine's events: those of requests to their streams, those of handoffs to the transport."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from common.errors import EngineLost
from decode_service.edge.live_requests import AllLiveRequests
from decode_service.edge.replicas import ReplicaBoard
from decode_service.edge.unread_events import UnreadEvents
from decode_service.handoff.transport import HandoffTransport
from decode_service.messages import (
    BreakCall,
    CancelHandoffRows,
    DegradedChanged,
    Event,
    Failed,
    Finished,
    PhaseBegan,
    PromptScored,
    SegmentsLanded,
    StartHandoff,
    Tokens,
)

MAX_AHEAD = 4
PATIENCE_S = 0.1


class EventRouter:
    """Passes the engine's events to the event loop `loop`, and there to `live_requests` or to `transport`.

    The engine's thread calls `deliver` and `on_death`; everything else runs on `loop`. The loop takes all events that
    wait in one call, and then does its other work before it takes more: so an engine that is faster than the loop
    leaves it time to write to clients. An engine that is ahead by `MAX_AHEAD` batches of events waits a moment for the
    loop: what it computes meanwhile would reach clients no earlier. Events are dropped when the loop is closed.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        live_requests: AllLiveRequests,
        transport: HandoffTransport,
        replicas: ReplicaBoard,
    ) -> None:
        self._loop = loop
        self._live_requests = live_requests
        self._transport = transport
        self._replicas = replicas
        self._delivered: SimpleQueue[Sequence[Event]] = SimpleQueue()
        self._has_taken = threading.Event()
        self._is_due = False  # whether `_dispatch` has been scheduled and has not begun

    def deliver(self, events: Sequence[Event]) -> None:
        if self._delivered.qsize() >= MAX_AHEAD:
            self._has_taken.wait(PATIENCE_S)
        self._delivered.put(events)
        self._has_taken.clear()
        if not self._is_due and not self._loop.is_closed():
            self._is_due = True
            self._loop.call_soon_threadsafe(self._dispatch)

    def on_death(self, error: BaseException) -> None:
        if not self._loop.is_closed():
            lost = EngineLost(f"the engine died: {type(error).__name__}: {error}")
            self._loop.call_soon_threadsafe(self._live_requests.fail_all, lost)

    def _dispatch(self) -> None:
        self._is_due = False  # before the queue is looked at, so that what comes later is noticed
        unread = UnreadEvents()
        for _ in range(self._delivered.qsize()):  # no more: the engine may deliver as fast as this takes
            unread.add(self._delivered.get_nowait())
        self._has_taken.set()
        for event in unread.take():
            match event:
                case PhaseBegan() | PromptScored() | Tokens() | Finished() | Failed():
                    self._live_requests.dispatch(event)
                case StartHandoff():
                    self._live_requests.handed_off([row.request_id for row in event.rows])
                    self._replicas.on_start(event)
                    self._transport.start(event)
                case CancelHandoffRows():
                    self._transport.cancel_rows(event)
                case BreakCall():
                    self._transport.break_call(event)
                case SegmentsLanded():
                    self._transport.landed(event)
                case DegradedChanged():
                    self._replicas.on_degraded(event)
