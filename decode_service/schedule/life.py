"""The phases of a request, what the request holds in each of them, and what moves it to another phase.

QUEUE ─▶ PREFILL ─▶ RECEIVING ─▶ TRANSFER ─▶ BOOTSTRAP ─▶ FIRST_DECODE ─▶ DECODE ─▶ DELIVERY
  ▲          └───────────┴───────────┤                          └─────┬──────┘
  │         the handoff was lost     │                                ▼ (a step in flight carries the row)
  └──────────────────────────────────┴──────── retracted ──────── RETRACTING

A prompt that is computed here goes QUEUE ─▶ LOCAL_PREFILL ─▶ BOOTSTRAP, or back to QUEUE if it is retracted or fails. A
running request that began with damaged cached KV goes back to QUEUE too. Every phase may also end in DELIVERY, when the
request finished, or in ENDED, when it failed or was aborted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.engine import Lifecycle, PhaseRule, Place
from common.kv.pool import KvPool, LeaseState, RowLease
from common.priority import Ageing
from decode_service.messages import CancelHandoffRows, Event, Phase, PhaseBegan, RowTaken, Submit
from decode_service.schedule.landing import LandingZone
from decode_service.schedule.local_prefill import LocalPrefill
from decode_service.schedule.request import Request
from decode_service.schedule.running_rows import RunningRows
from decode_service.schedule.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class RequestRule(PhaseRule[Phase]):
    """The rule of one phase of a request.

    The time spent in the phase is added to the field of Timings that `seconds` names, or to none if it is empty. If
    `is_announced`, PhaseBegan is posted for traced requests.
    """

    seconds: str = ""
    is_announced: bool = True


_ENDS = (Phase.DELIVERY, Phase.ENDED)


def _rule(
    place: Place, lease: LeaseState | None, seconds: str, *following: Phase, is_announced: bool = True
) -> RequestRule:
    return RequestRule(place, lease, (*following, *_ENDS), seconds, is_announced)


RULES: Mapping[Phase, RequestRule] = {
    Phase.QUEUE: _rule(Place.WAITING, None, "queue_s", Phase.PREFILL, Phase.LOCAL_PREFILL),
    Phase.LOCAL_PREFILL: _rule(Place.COMPUTING, LeaseState.RUNNING, "prefill_s", Phase.BOOTSTRAP, Phase.QUEUE),
    Phase.PREFILL: _rule(Place.HANDOFF, LeaseState.RESERVED, "prefill_s", Phase.RECEIVING, Phase.TRANSFER, Phase.QUEUE),
    Phase.RECEIVING: _rule(
        Place.HANDOFF, LeaseState.TRANSFERRING, "prefill_s", Phase.TRANSFER, Phase.QUEUE, is_announced=False
    ),
    Phase.TRANSFER: _rule(Place.HANDOFF, LeaseState.TRANSFERRING, "transfer_s", Phase.BOOTSTRAP, Phase.QUEUE),
    Phase.BOOTSTRAP: _rule(Place.ROWS, LeaseState.RUNNING, "first_decode_s", Phase.FIRST_DECODE, Phase.DECODE),
    Phase.FIRST_DECODE: _rule(
        Place.ROWS, LeaseState.RUNNING, "first_decode_s", Phase.DECODE, Phase.RETRACTING, Phase.QUEUE
    ),
    Phase.DECODE: _rule(Place.ROWS, LeaseState.RUNNING, "decode_s", Phase.RETRACTING, Phase.QUEUE),
    Phase.RETRACTING: _rule(Place.ROWS, LeaseState.RUNNING, "decode_s", Phase.QUEUE, is_announced=False),
    Phase.DELIVERY: RequestRule(Place.NOWHERE, None, ()),
    Phase.ENDED: RequestRule(Place.NOWHERE, None, (), is_announced=False),
}


class Lives(Lifecycle[Request, Phase]):
    """Holds every live request and moves it from phase to phase. Only the engine thread calls it.

    It alone writes `Request.seconds`, how long the request spent in which phases. `requests` has all live requests by
    id, `holding` those that hold a row, and `bringing_kv` those whose prompt's KV is on its way. `clock` is the
    engine's (monotonic seconds); `post` takes events for the edge.
    """

    def __init__(
        self,
        *,
        pool: KvPool,
        waiting: WaitingQueue,
        landing: LandingZone,
        local: LocalPrefill,
        rows: RunningRows,
        ageing: Ageing,
        clock: Callable[[], float],
        post: Callable[[Event], None],
    ) -> None:
        super().__init__(RULES, pool)
        self._waiting = waiting
        self._landing = landing
        self._local = local
        self._rows = rows
        self._ageing = ageing
        self._clock = clock
        self._post = post
        self._arrivals = itertools.count()
        self.requests: dict[str, Request] = {}
        self.holding: dict[Request, None] = {}
        self.bringing_kv: dict[Request, None] = {}

    def admit(self, submit: Submit) -> Request:
        """Creates the record of a new request and adds it to the waiting queue."""
        assert submit.request_id not in self.requests, "the edge refuses duplicates"
        req = Request.of(submit, arrival=next(self._arrivals), now_s=self._clock(), ageing=self._ageing)
        self.requests[req.request_id] = req
        self._waiting.add(req)
        return req

    def enter(
        self,
        req: Request,
        phase: Phase,
        *,
        at_s: float | None = None,
        lease: RowLease | None = None,
        replica: str = "",
        lost: str = "",
        was_retracted: bool = False,
    ) -> None:
        """Moves the request to `phase`, as `Lifecycle.enter` does.

        With a `lease` it counts in its client's share, whose turn is then over. `at_s` is when the phase begins, by the
        engine's clock; None means now. `lost` and `was_retracted` only go into the PhaseBegan event, which explains
        them.
        """
        at_s = self._clock() if at_s is None else at_s
        if req.refused_since_s is not None and RULES[req.phase].place is not Place.WAITING:  # a replica had its row
            req.refused_since_s += at_s - max(req.since_s, req.refused_since_s)
        req.spend(RULES[req.phase].seconds, until_s=at_s)
        super().enter(req, phase, lease=lease)
        if lease is not None:
            req.replica = replica
            self._waiting.started(req)
            self._post(RowTaken(req.request_id))
        for requests, is_one in ((self.holding, req.lease is not None), (self.bringing_kv, req.brings_kv)):
            if is_one:
                requests[req] = None
            else:
                requests.pop(req, None)
        if phase is Phase.BOOTSTRAP:
            self._keep(req)
        if RULES[phase].is_announced and req.is_traced:
            attempt = req.num_attempts if phase is Phase.PREFILL else 0
            num_held = 0 if lease is None else lease.num_cached
            self._post(PhaseBegan(req.request_id, phase, at_s, replica, attempt, num_held, lost, was_retracted))

    def _leave(self, req: Request, place: Place, following: Place) -> None:
        if place is Place.WAITING:
            self._waiting.remove(req)
        elif place is Place.ROWS:
            self._rows.leave(req)
            if self._pool.keeps_output:
                self._keep(req)
        elif place is Place.COMPUTING:
            self._local.forget(req)
        elif following is not Place.ROWS and (cancelled := self._landing.forget(req)) is not None:
            call_id, row = cancelled
            self._post(CancelHandoffRows(call_id, (row,)))

    def forget_kv(self, req: Request) -> None:
        """Makes the prefix cache forget the KV that the request uses and wrote, because it is damaged."""
        if req.lease is not None:
            self._pool.forget(req.lease)

    def _keep(self, req: Request) -> None:
        """Leaves the request's KV in the prefix cache, as far as it is complete.

        The last token has no KV yet, and the tokens that the drafter has not read lack what it computes of them.
        """
        assert req.lease is not None
        if req.lease.prefix is not None and (key := req.cache_key) is not None:
            num_unread = int(self._rows.num_unread[req.lease.row])
            self._pool.keep(req.lease, key.token_ids, len(key.token_ids) - 1 - num_unread)

    def _arrive(self, req: Request, place: Place) -> None:
        if place is Place.WAITING:
            self._waiting.add(req)
        elif place is Place.COMPUTING:
            self._local.begin(req)
        elif place is Place.ROWS:
            self._rows.enter(req)
        elif place is Place.NOWHERE:
            del self.requests[req.request_id]
