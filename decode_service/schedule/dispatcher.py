"""Hands waiting requests to prefill replicas: chooses a replica, reserves a row, and handles lost handoffs.

waiting ──reserve──▶ StartHandoff ──frames──▶ landing zone ──▶ ready
   ▲                                   │
   └──────────── lost, retryable ──────┘      lost for good ──▶ failed
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import BatonError, ContextExceeded, EngineFault, PrefillUnavailable
from common.kv.pool import CacheKey, KvPool, RowLease
from common.prompts.awaited_kv import AwaitedKv, awaited_kv
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.handoff import MAX_CALL_ROWS, Frame, HandoffRow
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
from decode_service.schedule.landing import AllComputed, FirstKv, FrameRejected, LandingZone, Scored
from decode_service.schedule.life import Lives
from decode_service.schedule.local_prefill import LocalPrefill
from decode_service.schedule.replica_set import ReplicaSet
from decode_service.schedule.request import LostRow, Request
from decode_service.schedule.schedule_batch import ReadyRows
from decode_service.schedule.waiting_queue import WaitingQueue

_WORTH_HOME = 4
"""A prompt that is not short is computed here only if every replica lacks so many times as many of its tokens as this
service, because here it delays the running rows.
"""

_LOOK_INTERVAL_S = 1.0
"""The longest time between two looks at the waiting queue. A change that may let a request start is seen at once in
most cases, and otherwise after this time.
"""


@dataclass(slots=True)
class _Spared:
    """The rows and slots that are kept free for requests that were refused or wait for KV. Requests that come after
    these in turn do not get them.
    """

    num_rows: int = 0
    num_tokens: int = 0

    def add(self, num_tokens: int) -> None:
        """Keeps one more row free, with `num_tokens` slots of its own."""
        self.num_rows += 1
        self.num_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class Short:
    """A waiting request that lacks a row or slots. Of its `num_tokens` tokens those need none that the prefix
    cache has for `key`; `is_received` says whether the others come from a replica. `num_spared_rows` rows and
    `num_spared` slots must be left after it.
    """

    req: Request
    num_tokens: int
    key: CacheKey | None
    is_received: bool
    num_spared_rows: int
    num_spared: int


class PrefillDispatcher:
    """Hands waiting requests to prefill replicas and handles the results. Only the engine thread calls it.

    `post` takes events for the edge; `fail` ends a request with an error. A request fails after `max_attempts`
    consecutive lost handoffs. It also fails when for `unavailable_timeout_s` no replica was ready, all were too small
    for its tokens, or all refused it; waiting for slots or for KV does not count. It fails at once if all replicas are
    ready, it is too long for each, and no larger one may come; or if all have another fingerprint and no others may
    come. A refused request is retried after at most `unavailable_timeout_s`, even if the replica asks for a longer
    wait. If a request was refused or waits for KV, none after it in turn gets the row and the slots that it will need.
    After `hand_off` `short` has the requests for which others may give way: the first in turn that lacks a row or
    slots, after which none started, and then the first of each client, to which its other tenants may owe some.

    A request waits while much of its KV is on its way for another one. Then it gets a row that shares that KV, and asks
    for the rest. A request of which at most `local_prefill_tokens` are left to compute is handed to no replica: `local`
    computes it. Unless that number is 0, `local` also computes longer requests of which every replica lacks much more
    than this service, one at a time.

    With `prefill_fallback` no request fails because no replica is ready. Shortly after the last replica has stopped
    being ready, `is_degraded` becomes True: `local` computes every request, at most one long one at a time, until a
    replica is ready again. DegradedChanged is posted when that begins and ends.
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
        self._is_degraded = False
        self._looked_s = -math.inf  # when the queue was looked at last
        self._was_short_of_slots = False  # at that look
        self.short: list[Short] = []
        self._seen: tuple[int, ...] | None = None  # the changes that the last look at the queue knew
        self._look_again_s = 0.0  # when the queue is looked at even if nothing has changed
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

    @property
    def _degraded_from_s(self) -> float:
        """The time, by the engine's clock, from which requests of any length are computed here, if no replica gets
        ready before. It is infinite if a replica is ready, or if the service computes only short prompts itself.
        """
        since_s = self._replicas.none_ready_since_s
        if since_s is None or not self._config.prefill_fallback:
            return math.inf
        return since_s + self._config.fallback_after_s

    def update_replicas(self, changed: ReplicasChanged) -> None:
        self._replicas.update(changed, self._clock(), num_outstanding=self._landing.uncomputed_tokens())
        self._seen = None

    def take_frame(self, call_id: str, frame: Frame) -> None:
        """Applies one frame of a call.

        If the frame does not fit the row that it names, that row fails and the call ends; its other rows are retried.
        """
        try:
            for news in self._landing.take_frame(call_id, frame):
                match news:
                    case FirstKv(req) if req.phase is Phase.PREFILL:
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
        """Puts lost rows back in the queue while attempts are left, and fails the others. Their reservations are
        released.
        """
        now_s = self._clock()
        for row in lost:
            req = row.req
            if not row.is_retryable or self._is_given_up(req, row, now_s):
                self._fail(req, row.error)
                continue
            self.num_row_retries += 1
            req.avoid_replica = row.replica
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

        Each replica gets one call, or several if it gets more than MAX_CALL_ROWS rows. The method looks through the
        queue only if something has changed that may let a request start or fail, or if it has not done so for a while.
        So a long queue costs most steps nothing.
        """
        now_s = self._clock()
        self._update_degraded(now_s)
        self.short = []
        if not self._waiting:
            self._was_short_of_slots = False
            self._shares.rest()
            return
        if self._seen == self._changes() and now_s < self._look_again_s:
            return
        self._excuse_waiting(now_s)
        self._shares.look(self._lives.holding, now_s)
        by_replica: dict[str, list[Request]] = {}
        spared = _Spared()
        num_outstanding: Counter[str] | None = None
        for req in self._waiting.in_turn(now_s):
            if req.not_before_s > now_s:
                spared.add(len(req.token_ids))
                continue
            if req.awaited is not None and not req.awaited.is_over:
                spared.add(len(req.token_ids) - req.awaited.num_tokens)
                continue
            candidates: Sequence[Replica] = ()
            if not (stays_home := self._stays_home(req)):
                candidates = self._replicas.candidates(avoid=req.avoid_replica, num_tokens=len(req.token_ids))
                if not candidates:
                    if not self._may_start_later:
                        break
                    continue
            if (awaited := self._begin_to_wait(req, stays_home=stays_home)) is not None:
                spared.add(len(req.token_ids) - awaited.num_tokens)
                continue
            lease = self._reserve(req, spared, stays_home=stays_home)
            if isinstance(lease, Short):
                self.short.append(lease)
                break
            if stays_home:
                self._lives.enter(req, Phase.LOCAL_PREFILL, at_s=now_s, lease=lease)
                req.found_cached(lease.num_cached)
                continue
            num_outstanding = self._landing.uncomputed_tokens() if num_outstanding is None else num_outstanding
            route = self._replicas.route(
                candidates,
                req.cache_key,
                uses_cached=not req.is_scored,
                num_tokens=len(req.token_ids),
                num_outstanding=num_outstanding,
            )
            num_outstanding[route.replica] += route.num_uncomputed
            self.num_expected_cached += route.num_cached
            req.num_uncomputed_tokens = route.num_uncomputed
            self._lives.enter(req, Phase.PREFILL, at_s=now_s, lease=lease, replica=route.replica)
            by_replica.setdefault(route.replica, []).append(req)
        for replica, reqs in by_replica.items():
            for start in range(0, len(reqs), MAX_CALL_ROWS):
                self._start_call(replica, reqs[start : start + MAX_CALL_ROWS], now_s)
        if self.short:
            self.short += [
                self._lack(req, spared, stays_home=self._stays_home(req))
                for req in self._waiting.first_of_each_client(now_s)
                if req is not self.short[0].req and req.not_before_s <= now_s and req.awaited is None
            ]
        self._looked_s, self._was_short_of_slots = now_s, bool(self.short)
        self._seen = self._changes()  # those who fail now may leave room to others
        self._look_again_s = min(self._fail_overdue(now_s), now_s + _LOOK_INTERVAL_S)
        for short in self.short:
            if now_s < (reclaim_s := short.req.since_s + self._config.reclaim_after_s):
                self._look_again_s = min(self._look_again_s, reclaim_s)
        if self._degraded_from_s > now_s:
            self._look_again_s = min(self._look_again_s, self._degraded_from_s)

    def _update_degraded(self, now_s: float) -> None:
        was_degraded, self._is_degraded = self._is_degraded, self._degraded_from_s <= now_s
        if self._is_degraded and not was_degraded:
            self._post(DegradedChanged(True, self._replicas.causes))
        elif was_degraded and not self._is_degraded:
            self._post(DegradedChanged(False))

    def _changes(self) -> tuple[int, ...]:
        """Returns a tuple. If it differs from that of the last look at the queue, a request may start that could not
        start then.

        Changes of the replicas are not part of it: `update_replicas` makes the next `hand_off` look at the queue
        anyway.
        """
        local = self._local
        return self._waiting.num_changes, self._pool.num_changes, local.num_short_left, local.has_long

    def _stays_home(self, req: Request) -> bool:
        """Returns whether this service computes the request's prompt itself, instead of handing it to a replica.

        It does if little of the prompt is left to compute, together with what is left of the short prompts that it
        computes already: so a burst of them does not hold up the running rows. It computes at most one longer prompt at
        a time: any, if no replica is ready; else one of which every replica would have to compute several times as many
        tokens. That is so after a long turn of a chat whose short turns were computed here, because their KV is in no
        replica's cache.
        """
        if not (self._config.local_prefill_tokens or self.is_degraded):
            return False
        num_tokens = len(req.token_ids)
        num_left = num_tokens - self._pool.num_cached(req.usable_key)
        if num_left + self._local.num_short_left <= self._max_short_tokens:
            return True
        if self._local.has_long:
            return False
        if self.is_degraded:
            return True
        most_there = _WORTH_HOME * num_left
        return most_there <= num_tokens and most_there <= self._replicas.least_uncomputed(
            self._replicas.candidates(avoid=req.avoid_replica, num_tokens=num_tokens), req.usable_key, num_tokens
        )

    @property
    def _max_short_tokens(self) -> int:
        """The most tokens that all short prompts computed here may have left, together."""
        return self._local.max_chunk_tokens if self.is_degraded else self._config.local_prefill_tokens

    def _begin_to_wait(self, req: Request, *, stays_home: bool) -> AwaitedKv | None:
        """Makes the request wait if much of its KV is on its way for another request. Returns the KV that it waits for,
        or None if it does not wait. `stays_home` means that this service computes the prompt itself.
        """
        req.awaited = None
        if self._pool.num_free_rows:
            is_received = req.needs_kv and not stays_home
            req.awaited = awaited_kv(self._pool, req.usable_key, self._lives.bringing_kv, is_received=is_received)
        return req.awaited

    @property
    def _may_start_later(self) -> bool:
        """Whether a request later in turn may start although no replica takes an earlier one, because the later one is
        shorter.
        """
        return self._replicas.none_ready_since_s is None or self._local.num_short_left < self._max_short_tokens

    def _held_bytes(self, req: Request) -> int:
        """Returns the size of the KV that was not sent for a request, because it was here."""
        if not req.needs_kv:
            return 0
        num_tokens = len(req.token_ids)
        return sum(
            group.token_bytes * max(0, req.num_unsent(name) - self._pool.first_kept(name, num_tokens))
            for name, group in self._pool.groups.items()
        )

    def _reserve(self, req: Request, spared: _Spared, *, stays_home: bool) -> RowLease | Short:
        """Reserves a row for `req`, with slots for the KV that it will have here, or returns what it lacks.

        Rows and slots that are `spared` do not count as free, nor do some slots for each row in use. `stays_home` means
        that this service computes the prompt itself.
        """
        lack = self._lack(req, spared, stays_home=stays_home)
        if self._pool.num_free_rows <= spared.num_rows:
            return lack
        lease = self._pool.reserve(
            lack.num_tokens,
            key=req.cache_key if lack.num_tokens else None,
            uses_cached=not (stays_home and req.is_scored),
            num_spared=lack.num_spared,
            is_received=lack.is_received,
        )
        return lack if lease is None else lease

    def _lack(self, req: Request, spared: _Spared, *, stays_home: bool) -> Short:
        num_others = self._pool.rows.max_rows - self._pool.num_free_rows + spared.num_rows
        num_spared = spared.num_tokens
        if num_others:
            num_spared += (num_others + 1) * self._config.headroom_tokens
        num_tokens = len(req.token_ids) if req.needs_kv or stays_home else 0
        key = None if not num_tokens or (stays_home and req.is_scored) else req.cache_key
        return Short(req, num_tokens, key, not stays_home and num_tokens > 0, spared.num_rows, num_spared)

    def _start_call(self, replica: str, reqs: list[Request], now_s: float) -> None:
        call_id = f"call-{next(self._call_numbers)}"
        rows = []
        for req in reqs:
            assert req.lease is not None
            rows.append(
                HandoffRow(
                    request_id=req.request_id,
                    attempt=req.num_attempts,
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
            )
            req.num_attempts += 1
        self._landing.open(call_id, replica, reqs)
        self._post(StartHandoff(call_id, replica, tuple(rows)))

    def _excuse_waiting(self, now_s: float) -> None:
        """Extends the waiting limit of refused requests by the time for which they waited for this service's slots, or
        for KV that is on its way for another request.

        That is the time since the last look at the queue, if at that look slots were too few or the KV had not come. A
        request that is too long for every replica gets no extension, because it waits for neither.
        """
        for req in self._waiting:
            if req.refused_since_s is None or req.not_before_s > now_s:
                continue
            if not self._was_short_of_slots and req.awaited is None:
                continue
            if self._replicas.too_long_error(len(req.token_ids)) is None:
                req.refused_since_s += now_s - max(self._looked_s, req.not_before_s, req.since_s)

    def _fail_overdue(self, now_s: float) -> float:
        """Fails the waiting requests that no replica takes in time, because none is ready or the request is too long
        for each.

        Returns when the next one may fail, or may be retried after a refusal, by the engine's clock.
        """
        next_s = math.inf
        for req in self._waiting:
            if req.not_before_s > now_s:
                next_s = min(next_s, req.not_before_s)
            if (failure := self._failure_of(req, now_s)) is None:
                continue
            error, limit_s = failure
            if limit_s <= now_s:
                self._fail(req, error)
            else:
                next_s = min(next_s, limit_s)
        return next_s

    def _failure_of(self, req: Request, now_s: float) -> tuple[BatonError, float] | None:
        """Returns the error with which the request fails if the replicas stay as they are, and when, by the engine's
        clock.

        Returns None if the request does not fail. The time is now if waiting cannot help.
        """
        if self._degraded_from_s < math.inf:
            return None
        if (since_s := self._replicas.none_ready_since_s) is not None:
            limit_s = max(since_s, req.since_s) + self._config.prefill_timeout_s
            return self._replicas.unavailable_error(), now_s if self._replicas.are_hopeless else limit_s
        error = self._replicas.too_long_error(len(req.token_ids))
        if error is None:
            return None
        return error, now_s if isinstance(error, ContextExceeded) else self._refusal_limit_s(req, now_s)

    def _is_given_up(self, req: Request, row: LostRow, now_s: float) -> bool:
        """Returns whether the request should fail instead of being retried.

        Lost handoffs are limited by their number, which is counted here. Refusals are limited by time, because a full
        or stopping replica refuses at once.
        """
        if not row.is_refusal:
            req.num_failures += 1
            return req.num_failures >= self._config.max_handoff_attempts
        return self._degraded_from_s == math.inf and self._refusal_limit_s(req, now_s) <= now_s

    def _refusal_limit_s(self, req: Request, now_s: float) -> float:
        """Returns when no replica will have taken the request for `unavailable_timeout_s`.

        That time begins when this function is first asked about the request: after its first refusal, or when it is
        first seen to be too long for the ready replicas.
        """
        if req.refused_since_s is None:
            req.refused_since_s = now_s
        return req.refused_since_s + self._config.prefill_timeout_s


def _time_left_ms(seconds: float) -> int:
    """Returns what a row says of the time until its deadline. A deadline that has passed leaves 1 ms."""
    return 0 if math.isinf(seconds) else max(1, math.ceil(seconds * 1000))
