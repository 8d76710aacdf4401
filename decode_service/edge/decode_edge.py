"""The decode service's edge beside its engine: it starts and stops with the service, and routes the engine's events.

engine ─▶ EventRouter ├─ events of requests ─▶ their streams
                      └─ handoffs ─▶ the transport
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from queue import SimpleQueue

from common.drain import Drain
from common.errors import BatonError, Draining, EngineLost
from common.sampling.params import TokenLogprobs
from common.service.engine_thread import EnginePort
from decode_service.edge.live_requests import AllLiveRequests
from decode_service.edge.replicas import ReplicaBoard
from decode_service.handoff.transport import HandoffTransport
from decode_service.messages import (
    BreakCall,
    CancelHandoffRows,
    Command,
    DegradedChanged,
    Event,
    Failed,
    Finished,
    PhaseBegan,
    PromptScored,
    RowTaken,
    SegmentsLanded,
    StartHandoff,
    Tokens,
)

MAX_AHEAD = 4
PATIENCE_S = 0.1


class DecodeEdge:
    """A ServiceEdge of the decode service: it serves clients' requests and talks to prefill replicas. For the event
    loop only.
    """

    def __init__(
        self,
        *,
        engine: EnginePort[Command],
        live_requests: AllLiveRequests,
        replicas: ReplicaBoard,
        transport: HandoffTransport,
    ) -> None:
        self._engine = engine
        self._live_requests = live_requests
        self._replicas = replicas
        self._transport = transport

    async def open(self) -> None:
        await self._transport.open()

    @property
    def is_ready(self) -> bool:
        """Whether the service can admit requests: it is not draining, and a prefill replica is ready or not needed.

        A replica is ready only if its fingerprint agrees, so an admitted request can be computed.
        """
        return self._replicas.can_serve and not self._live_requests.is_draining

    @property
    def num_open(self) -> Mapping[str, int]:
        return {"num_requests": len(self._live_requests)}

    def drain(self) -> None:
        """Stops admitting requests. The engine goes on with those it has, and is told to drain only by `end_rest`."""
        self._live_requests.drain()

    async def wait_idle(self) -> None:
        await self._live_requests.wait_idle()

    def fail_all(self, error: BatonError) -> None:
        self._live_requests.fail_all(error)

    def end_rest(self) -> None:
        self._engine.post(Drain())
        self._live_requests.fail_all(Draining("the service stopped before the request's end"))

    async def close(self) -> None:
        await self._transport.close()


class EventRouter:
    """Passes the engine's events to the event loop `loop`, and there to `live_requests` or to `transport`.

    The engine's thread calls `deliver` and `on_death`; everything else runs on `loop`. The loop takes all events that
    wait in one call, and then does its other work before it takes more: so an engine that is faster than the loop
    leaves it time to write to clients. An engine that is ahead by `MAX_AHEAD` batches of events waits for the loop, at
    most PATIENCE_S: what it computed meanwhile would reach clients no earlier. Events are dropped when the loop is
    closed.
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
                case PhaseBegan() | RowTaken() | PromptScored() | Tokens() | Finished() | Failed():
                    self._live_requests.dispatch(event)
                case StartHandoff():
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


class UnreadEvents:
    """Collects the engine's events until the edge takes them.

    An edge that is slower than the engine takes the tokens of several steps at once, which costs little more than
    taking one step's. So at most the live requests' output waits here. Events keep their order, except that all tokens
    are merged into one event, which comes after the other events and before the ends of requests.
    """

    def __init__(self) -> None:
        self._others: list[Event] = []
        self._tokens: dict[str, tuple[list[int], list[TokenLogprobs | None]]] = {}
        self._ends: list[Event] = []

    def __bool__(self) -> bool:
        return bool(self._others or self._tokens or self._ends)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self._add_tokens(event)
                case Finished() | Failed():
                    self._ends.append(event)
                case _:
                    self._others.append(event)

    def take(self) -> list[Event]:
        """Removes and returns all events."""
        events = [*self._others, *([_merged(self._tokens)] if self._tokens else []), *self._ends]
        self._others, self._tokens, self._ends = [], {}, []
        return events

    def _add_tokens(self, event: Tokens) -> None:
        stop = 0
        for request_id, num_tokens in zip(event.request_ids, event.num_tokens, strict=True):
            start, stop = stop, stop + num_tokens
            token_ids, logprobs = self._tokens.setdefault(request_id, ([], []))
            token_ids += event.token_ids[start:stop]
            logprobs += event.logprobs[start:stop] or repeat(None, num_tokens)


def _merged(tokens: dict[str, tuple[list[int], list[TokenLogprobs | None]]]) -> Tokens:
    """Returns one event with the `tokens` of all requests, which are given by id."""
    logprobs = tuple(chain.from_iterable(logprobs for _, logprobs in tokens.values()))
    return Tokens(
        request_ids=tuple(tokens),
        num_tokens=tuple(len(token_ids) for token_ids, _ in tokens.values()),
        token_ids=tuple(chain.from_iterable(token_ids for token_ids, _ in tokens.values())),
        logprobs=logprobs if any(entry is not None for entry in logprobs) else (),
    )
