"""Hands waiting requests to prefill replicas: carries out what the policy decides, and handles lost handoffs.

waiting ──reserve──▶ StartHandoff ──frames──▶ landing zone ──▶ ready
   ▲                                   │
   └──────────── lost, retryable ──────┘      lost for good ──▶ failed
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.errors import BatonError, EngineFault, PrefillUnavailable
from common.kv.pool import KvPool, RowLease
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.handoff import MAX_CALL_BYTES, MAX_CALL_FIELDS, MAX_CALL_ROWS, Frame, HandoffRow
from decode_service.messages import (
    BreakCall,
    DegradedChanged,
    Event,
    Phase,
    PromptScored,
    Replica,
    ReplicasChanged,
    StartHandoff,
)
from decode_service.schedule.config import DecodeConfig
from decode_service.schedule.handoff_policy import (
    ComputeHere,
    HandoffPolicy,
    HandOver,
    Later,
    NoReplica,
    RowNeed,
    Spared,
)
from decode_service.schedule.landing import AllComputed, FrameRejected, KvArrived, LandingZone, Scored
from decode_service.schedule.life import Lives
from decode_service.schedule.local_prefill import LocalPrefill
from decode_service.schedule.replica_set import ReplicaSet
from decode_service.schedule.request import LostRow, Request
from decode_service.schedule.schedule_batch import ReadyRows
from decode_service.schedule.waiting_queue import WaitingQueue

_LOOK_INTERVAL_S = 1.0
"""The longest time between two looks at the waiting queue. A change that may let a request start is seen at once in
most cases, and otherwise after this time.
"""


@dataclass(frozen=True, slots=True)
class _Look:
    """A look at the waiting queue: its time, whether a request lacked a row or slots, and the result of `_changes`
    (None: the next `hand_off` looks again). At `again_s` the next look comes even if nothing has changed.
    """

    at_s: float = -math.inf
    was_short: bool = False
    changes: tuple[int, ...] | None = None
    again_s: float = 0.0


class PrefillDispatcher:
    """Hands waiting requests to prefill replicas, as the policy decides, and handles the results. Only the engine
    thread calls it.

    `post` takes events for the edge; `fail` ends a request with an error. A request fails after `max_handoff_attempts`
    consecutive lost handoffs. It also fails when for `prefill_timeout_s` no replica was ready, all were too small for
    its tokens, or all refused it; waiting for slots or for KV, and time at a replica, do not count. It fails at once if
    it is too long for all replicas, all are ready, and no larger one may come; or if all have a different fingerprint,
    and no others may come. A refused request is retried after at most `prefill_timeout_s`, even if the replica asks for
    a longer wait. If a request was refused or waits for KV, no request after it in turn gets the row and slots that it
    will need.

    After `hand_off`, `short` has the needs of requests for which others may give way. First comes the first in turn
    that lacks a row or slots; no request after it was started. Then comes the next request of each client with several
    tenants. DegradedChanged is posted when this service begins or stops computing prompts of any length.
    """

    def __init__(
        self,
        *,
        pool: KvPool,
        waiting: WaitingQueue,
        landing: LandingZone,
        lives: Lives,
        local: LocalPrefill,
        replicas: ReplicaSet,
        config: DecodeConfig,
        clock: Callable[[], float],
        post: Callable[[Event], None],
        fail: Callable[[Request, BatonError], None],
    ) -> None:
        self._pool = pool
        self._landing = landing
        self._local = local
        self._config = config
        self._clock = clock
        self._post = post
        self._fail = fail
        self._waiting = waiting
        self._shares = waiting.shares
        self._lives = lives
        self._replicas = replicas
        self._policy = HandoffPolicy(
            config, pool=pool, local=local, replicas=replicas, level=waiting.level, bringing_kv=lives.bringing_kv
        )
        self._is_degraded = False
        self._last_look = _Look()
        self.short: list[RowNeed] = []
        self._call_numbers = itertools.count()
        self.num_row_retries = 0
        self.held_bytes = 0  # KV that was not sent for rows that have landed, because it was here
        self.num_expected_cached = 0  # tokens that replicas were expected to have cached when rows were handed to them

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_landing(self) -> bool:
        return self._landing.is_copying

    @property
    def is_degraded(self) -> bool:
        """Whether the last `hand_off` let requests of any length be computed here, because no replica is ready."""
        return self._is_degraded

    def update_replicas(self, changed: ReplicasChanged) -> None:
        self._replicas.update(changed, self._clock(), num_outstanding=self._landing.uncomputed_tokens())
        self._last_look = replace(self._last_look, changes=None)

    def take_frame(self, call_id: str, frame: Frame) -> None:
        """Applies one frame of a call.

        If the frame does not fit the row that it names, that row fails and the call ends; its other rows are retried.
        """
        try:
            for news in self._landing.take_frame(call_id, frame):
                match news:
                    case KvArrived(req) if req.phase is Phase.PREFILL:
                        self._lives.enter(req, Phase.RECEIVING)
                    case Scored(req, logprobs):
                        self._post_scores(req, logprobs)
                    case AllComputed(req):
                        self._lives.enter(req, Phase.TRANSFER)
                    case LostRow():
                        self.handle_lost([news])
        except FrameRejected as rejected:
            self._post(BreakCall(call_id, str(rejected)))
            guilty = self._landing.request_of(call_id, rejected.row)
            cause = PrefillUnavailable(f"the replica broke the protocol: {rejected}")
            lost = self._landing.end_call(call_id, cause)
            if guilty is not None:
                self._fail(guilty, EngineFault(f"the handoff broke the protocol: {rejected}"))
            self.handle_lost([row for row in lost if row.req is not guilty])

    def _post_scores(self, req: Request, logprobs: PromptLogprobs) -> None:
        if (new := req.take_scores(logprobs)) is not None:
            self._post(PromptScored(req.request_id, new))

    def end_call(self, call_id: str, error: BatonError | None) -> None:
        self.handle_lost(self._landing.end_call(call_id, error))

    def handle_lost(self, lost: Sequence[LostRow]) -> None:
        """Puts requests of lost rows back in the queue if they may be retried, else fails them. Releases the rows."""
        now_s = self._clock()
        for row in lost:
            req = row.req
            was_refused = req.refused_since_s is not None
            if not row.is_refusal:
                req.num_failures += 1
            elif not was_refused and self._policy.degraded_from_s == math.inf:
                req.refused_since_s = now_s
            if self._policy.is_given_up(row, now_s):
                self._fail(req, row.error)
                continue
            self.num_row_retries += 1
            req.avoid_replica = row.replica
            others = self._replicas.candidates(avoid=row.replica, num_tokens=len(req.token_ids))
            if was_refused or all(other.address == row.replica for other in others):  # else another may have room now
                req.not_before_s = now_s + min(row.retry_after_s, self._config.prefill_timeout_s)
            self._lives.enter(req, Phase.QUEUE, at_s=now_s, lost=str(row.error))

    def collect(self) -> tuple[ReadyRows, ...]:
        """Returns the rows that have become ready, and handles those whose copies or local prefill failed.

        Posts SegmentsLanded for segments that are copied or dropped.
        """
        local = self._local.collect()
        for req, logprobs in local.scored:
            self._post_scores(req, logprobs)
        if not self._landing.has_news and not local.ready and not local.lost:
            return ()
        landed = self._landing.poll()
        now_s = self._clock()
        self.handle_lost((*landed.lost, *local.lost))
        for freed in landed.freed:
            self._post(freed)
        for part in landed.ready:
            self.held_bytes += sum(map(self._held_bytes, part.reqs))
        ready = (*landed.ready, *local.ready)
        for part in ready:
            for req in part.reqs:
                req.num_failures = 0
                req.refused_since_s = None
                self._lives.enter(req, Phase.BOOTSTRAP, at_s=now_s)
        return ready

    def hand_off(self) -> None:
        """Reserves rows for waiting requests in turn and starts the calls to replicas.

        The method looks through the queue only if something has changed that may let a request start or fail, or if it
        has not done so for a while. So a long queue costs most steps nothing.
        """
        now_s = self._clock()
        self._update_degraded(now_s)
        self.short = []
        if not self._waiting:
            if self._last_look.was_short:
                self._last_look = replace(self._last_look, was_short=False)
            self._shares.rest()
            return
        if self._last_look.changes == self._changes() and now_s < self._last_look.again_s:
            return
        self._excuse_waiting(now_s)
        self._shares.look(self._lives.holding, now_s)
        spared = self._start_in_turn(now_s)
        if self.short:
            self.short += [
                self._policy.need_of(req, spared, stays_home=self._policy.stays_home(req, now_s))
                for req in self._waiting.first_of_each_client(now_s)
                if req is not self.short[0].req and req.not_before_s <= now_s and req.awaited is None
            ]
        changes = self._changes()  # before requests fail, which may leave room for others
        reclaims_s = [need.req.since_s + self._config.reclaim_after_s for need in self.short]
        times_s = [now_s + _LOOK_INTERVAL_S, self._fail_overdue(now_s)]
        times_s += [each_s for each_s in (*reclaims_s, self._policy.degraded_from_s) if each_s > now_s]
        self._last_look = _Look(now_s, bool(self.short), changes, min(times_s))

    def _start_in_turn(self, now_s: float) -> Spared:
        """Starts waiting requests in turn until one lacks a row or slots, or none can start. Returns the rows and slots
        spared.

        Each replica gets one call, or several if its rows are more than one call may have.
        """
        by_replica: dict[str, list[Request]] = {}
        spared = Spared()
        num_outstanding: Counter[str] | None = None
        for req in self._waiting.in_turn(now_s):
            match self._policy.decide(req, spared, now_s):
                case Later(num_tokens, awaited):
                    req.awaited = awaited
                    spared = spared.and_row(num_tokens)
                case NoReplica(is_for_all):
                    if is_for_all:
                        break
                case ComputeHere(need):
                    req.awaited = None
                    if (lease := self._reserve(need)) is None:
                        break
                    self._lives.enter(req, Phase.LOCAL_PREFILL, at_s=now_s, lease=lease)
                    req.found_cached(lease.num_cached)
                case HandOver(need, candidates):
                    req.awaited = None
                    if (lease := self._reserve(need)) is None:
                        break
                    if num_outstanding is None:
                        num_outstanding = self._landing.uncomputed_tokens()
                    replica = self._route(req, candidates, num_outstanding)
                    self._lives.enter(req, Phase.PREFILL, at_s=now_s, lease=lease, replica=replica)
                    by_replica.setdefault(replica, []).append(req)
        for replica, reqs in by_replica.items():
            self._start_calls(replica, reqs, now_s)
        return spared

    def _reserve(self, need: RowNeed) -> RowLease | None:
        """Reserves a row with slots for the KV that the request will have here. If there are too few, adds `need` to
        `short` and returns None.
        """
        lease = None
        if self._pool.num_free_rows > need.num_spared_rows:
            lease = self._pool.reserve(
                need.num_tokens,
                key=need.req.cache_key if need.num_tokens else None,
                uses_cached=need.key is not None,
                num_spared=need.num_spared,
                is_received=need.is_received,
            )
        if lease is None:
            self.short.append(need)
        return lease

    def _route(self, req: Request, candidates: Sequence[Replica], num_outstanding: Counter[str]) -> str:
        """Chooses the replica for a request and returns its address. `num_outstanding` counts the tokens that each
        replica is to compute for this service; this method adds the request's.
        """
        route = self._replicas.route(
            candidates,
            req.cache_key,
            uses_cached=not req.is_scored,
            num_tokens=len(req.token_ids),
            num_outstanding=num_outstanding,
        )
        self._replicas.add(route.replica, req.cache_key)
        num_outstanding[route.replica] += route.num_uncomputed
        self.num_expected_cached += route.num_cached
        req.num_uncomputed_tokens = route.num_uncomputed
        return route.replica

    def _update_degraded(self, now_s: float) -> None:
        was_degraded, self._is_degraded = self._is_degraded, self._policy.is_degraded(now_s)
        if self._is_degraded and not was_degraded:
            self._post(DegradedChanged(True, self._replicas.causes))
        elif was_degraded and not self._is_degraded:
            self._post(DegradedChanged(False))

    def _changes(self) -> tuple[int, ...]:
        """Returns counts. If they differ from those of the last look at the queue, a request may start that could not
        start then.

        Changes of replicas are not counted: `update_replicas` makes the next `hand_off` look at the queue anyway.
        """
        local = self._local
        return self._waiting.num_changes, self._pool.num_changes, local.num_short_left, local.has_long

    def _held_bytes(self, req: Request) -> int:
        """Returns the size of the KV that was not sent for a request, because it was here."""
        if not req.needs_kv:
            return 0
        num_tokens = len(req.token_ids)
        return sum(
            group.token_bytes * max(0, req.num_unsent(name) - self._pool.first_kept(name, num_tokens))
            for name, group in self._pool.groups.items()
        )

    def _start_calls(self, replica: str, reqs: Sequence[Request], now_s: float) -> None:
        """Asks the replica for the rows of these requests, in calls of at most MAX_CALL_ROWS, MAX_CALL_BYTES and
        MAX_CALL_FIELDS.
        """
        calls: list[list[HandoffRow]] = []
        num_bytes = num_fields = 0
        for req in reqs:
            row = self._next_row(req, now_s)
            num_bytes, num_fields = num_bytes + row.most_bytes, num_fields + row.most_fields
            is_full = bool(calls) and len(calls[-1]) == MAX_CALL_ROWS
            if not calls or is_full or num_bytes > MAX_CALL_BYTES or num_fields > MAX_CALL_FIELDS:
                calls.append([])
                num_bytes, num_fields = row.most_bytes, row.most_fields
            calls[-1].append(row)
        start = 0
        for rows in calls:
            call_id = f"call-{next(self._call_numbers)}"
            self._landing.open(call_id, replica, reqs[start : start + len(rows)])
            self._post(StartHandoff(call_id, replica, tuple(rows)))
            start += len(rows)

    def _next_row(self, req: Request, now_s: float) -> HandoffRow:
        """Returns what the next attempt to hand the request over asks for, and counts that attempt."""
        attempt, req.num_attempts = req.num_attempts, req.num_attempts + 1
        return HandoffRow(
            request_id=req.request_id,
            attempt=attempt,
            token_ids=tuple(req.token_ids),
            prompt_len=req.prompt_len,
            sampling=req.attempt_sampling,
            choice_index=req.choice_index,
            time_left_ms=_time_left_ms(req.deadline_s - now_s),
            traceparent=req.traceparent,
            num_held_tokens=tuple((name, req.num_unsent(name)) for name in sorted(self._pool.groups)),
            cache_salt=req.namespace,
            priority=self._waiting.level(req, now_s),
            client=f"{req.client} / {req.tenant}" if req.tenant else req.client,
        )

    def _excuse_waiting(self, now_s: float) -> None:
        """Extends the waiting limit of refused requests by the time for which they did not wait for a replica."""
        last = self._last_look
        for req in self._waiting:
            if req.refused_since_s is not None and self._policy.is_excused(req, now_s, was_short=last.was_short):
                req.refused_since_s += now_s - max(last.at_s, req.not_before_s, req.since_s)

    def _fail_overdue(self, now_s: float) -> float:
        """Fails the waiting requests that no replica takes in time, because none is ready or the request is too long
        for each, which counts as a refusal.

        Returns when the next one may fail, or may be retried after a refusal, by the engine's clock.
        """
        next_s = math.inf
        for req in self._waiting:
            if req.not_before_s > now_s:
                next_s = min(next_s, req.not_before_s)
            if (failure := self._policy.failure_of(req, now_s)) is None:
                continue
            if failure.is_refusal and req.refused_since_s is None:
                req.refused_since_s = now_s
            if failure.limit_s <= now_s:
                self._fail(req, failure.error)
            else:
                next_s = min(next_s, failure.limit_s)
        return next_s


def _time_left_ms(seconds: float) -> int:
    """Returns a row's time until its deadline in ms: 0 without one, 1 if it has passed."""
    return 0 if math.isinf(seconds) else max(1, math.ceil(seconds * 1000))
