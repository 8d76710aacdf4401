"""Routes the engine's events: those of requests to their streams, those of handoffs to the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common.errors import EngineLost
from decode_service.edge.live_requests import LiveRequests
from decode_service.edge.replicas import ReplicaBoard
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


class EventRouter:
    """Passes the engine's events to the event loop `loop`, and there to `live_requests` or to `transport`.

    The engine's thread calls `deliver` and `on_death`; everything else runs on `loop`. Each batch of events is passed
    on in one call, which keeps their order. Events are dropped when the loop is closed.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        live_requests: LiveRequests,
        transport: HandoffTransport,
        replicas: ReplicaBoard,
    ) -> None:
        self._loop = loop
        self._live_requests = live_requests
        self._transport = transport
        self._replicas = replicas

    def deliver(self, events: Sequence[Event]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, tuple(events))

    def on_death(self, error: BaseException) -> None:
        if not self._loop.is_closed():
            lost = EngineLost(f"the engine died: {type(error).__name__}: {error}")
            self._loop.call_soon_threadsafe(self._live_requests.fail_all, lost)

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case PhaseBegan() | PromptScored() | Tokens() | Finished() | Failed():
                    self._live_requests.dispatch(event)
                case StartHandoff():
                    self._live_requests.handed_off(row.request_id for row in event.rows)
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
