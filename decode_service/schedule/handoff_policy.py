"""Decides what becomes of a waiting request: who computes its prompt, what it needs first, and when it fails.

Its methods change nothing. The dispatcher asks about the requests in turn, and carries each decision out before it asks
about the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.errors import BatonError, ContextExceeded
from common.kv.pool import CacheKey, KvPool
from common.prompts.awaited_kv import AwaitedKv, awaited_kv
from decode_service.messages import Phase, Replica
from decode_service.schedule.config import DecodeConfig
from decode_service.schedule.local_prefill import LocalPrefill
from decode_service.schedule.replica_set import ReplicaSet
from decode_service.schedule.request import LostRow, Request

_WORTH_HOME = 4
"""While a replica is ready, a long prompt is computed here, where it delays the running rows, only if every replica
would have to compute this many times as many of its tokens.
"""


@dataclass(frozen=True, slots=True)
class Spared:
    """The rows and slots that are kept free for requests that were refused or wait for KV. Requests that come after
    these in turn do not get them.
    """

    num_rows: int = 0
    num_tokens: int = 0

    def and_row(self, num_tokens: int) -> Spared:
        """Returns this with one more row, which has `num_tokens` slots of its own."""
        return Spared(self.num_rows + 1, self.num_tokens + num_tokens)


@dataclass(frozen=True, slots=True)
class RowNeed:
    """The row and slots that a waiting request needs. Each of its `num_tokens` tokens needs a slot, unless the prefix
    cache has its KV for `key`. `is_received` says whether the other KV comes from a replica. `num_spared_rows` rows and
    `num_spared` slots must be left.
    """

    req: Request
    num_tokens: int
    key: CacheKey | None
    is_received: bool
    num_spared_rows: int
    num_spared: int


@dataclass(frozen=True, slots=True)
class Later:
    """The request was refused a moment ago, or waits for the KV `awaited`, which is on its way for another request. The
    row and the `num_tokens` slots that it will need stay free.
    """

    num_tokens: int
    awaited: AwaitedKv[Request] | None


@dataclass(frozen=True, slots=True)
class NoReplica:
    """No replica takes the request. If `is_for_all`, no request after it in turn can start either."""

    is_for_all: bool


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """This service computes the request's prompt, if the pool has what it needs."""

    need: RowNeed


@dataclass(frozen=True, slots=True)
class HandOver:
    """One of the `candidates` computes the request's prompt, if the pool has what it needs."""

    need: RowNeed
    candidates: Sequence[Replica]


Decision = Later | NoReplica | ComputeHere | HandOver


@dataclass(frozen=True, slots=True)
class Failure:
    """A request fails with `error` at the time `limit_s` if the replicas stay as they are. If `is_refusal`, this counts
    as a refusal, and the time counts from the request's first one.
    """

    error: BatonError
    limit_s: float
    is_refusal: bool = False


class HandoffPolicy:
    """Decides what to do with waiting requests, from the state of the pool, the local prefill and the replicas.

    A request waits while much of its KV is on its way for another one, of `bringing_kv`. Then it gets a row that shares
    that KV, and asks for the rest. It does not wait for one that a replica has yet to compute if that one's `level` is
    worse by more than rounding, or that replica is no longer ready. If at most `local_prefill_tokens` are left to
    compute of a request and of the short prompts that `local` has already, it is handed to no replica: `local` computes
    it. Unless that number is 0, `local` also computes longer requests, one at a time, if every replica would have to
    compute much more.

    With `prefill_fallback` no request fails because no replica is ready. Shortly after the last replica has stopped
    being ready the service is degraded: `local` computes every request, at most one long one at a time, until a replica
    is ready again.

    Times are the engine's, in seconds. Only the engine thread calls it.
    """

    def __init__(
        self,
        config: DecodeConfig,
        *,
        pool: KvPool,
        local: LocalPrefill,
        replicas: ReplicaSet,
        level: Callable[[Request, float], int],
        bringing_kv: Iterable[Request],
    ) -> None:
        self._config = config
        self._pool = pool
        self._local = local
        self._replicas = replicas
        self._level = level
        self._bringing_kv = bringing_kv

    # ---- starting -------------------------------------------------------------------------------------------------

    def decide(self, req: Request, spared: Spared, now_s: float) -> Decision:
        """Returns what to do with `req`. The rows and slots that are `spared` do not count as free."""
        num_tokens = len(req.token_ids)
        if req.not_before_s > now_s:
            return Later(num_tokens, req.awaited)
        if (awaited := req.awaited) is not None and not awaited.is_over and self._is_soon(awaited.source, req, now_s):
            return Later(num_tokens - awaited.num_tokens, awaited)
        candidates: Sequence[Replica] = ()
        if not (stays_home := self.stays_home(req, now_s)):
            candidates = self._replicas.candidates(avoid=req.avoid_replica, num_tokens=num_tokens)
            if not candidates:
                return NoReplica(is_for_all=not self._may_start_later(now_s))
        if self._pool.num_free_rows:
            is_received = req.needs_kv and not stays_home
            sources = (each for each in self._bringing_kv if self._is_soon(each, req, now_s))
            awaited = awaited_kv(self._pool, req.usable_key, sources, is_received=is_received)
            if awaited is not None:
                return Later(num_tokens - awaited.num_tokens, awaited)
        need = self.need_of(req, spared, stays_home=stays_home)
        return ComputeHere(need) if stays_home else HandOver(need, candidates)

    def _is_soon(self, source: Request, req: Request, now_s: float) -> bool:
        """Returns whether the KV of `source` comes about as soon as `req` would get its own: it is computed here, or
        computed already, or by a replica that is still ready and serves `req` hardly earlier.
        """
        if not source.replica or source.phase is Phase.TRANSFER:
            return True
        is_later = source.due_s - req.due_s >= self._config.ageing.step_s
        is_worse = is_later and self._level(source, now_s) > self._level(req, now_s)
        return self._replicas.is_ready(source.replica) and not is_worse

    def need_of(self, req: Request, spared: Spared, *, stays_home: bool) -> RowNeed:
        """Returns the row and slots that `req` needs. `stays_home` means that this service computes the prompt."""
        num_others = self._pool.rows.max_rows - self._pool.num_free_rows + spared.num_rows
        num_spared = spared.num_tokens
        if num_others:
            num_spared += (num_others + 1) * self._config.headroom_tokens
        num_tokens = len(req.token_ids) if req.needs_kv or stays_home else 0
        key = None if not num_tokens or (stays_home and req.is_scored) else req.cache_key
        return RowNeed(req, num_tokens, key, not stays_home and num_tokens > 0, spared.num_rows, num_spared)

    def stays_home(self, req: Request, now_s: float) -> bool:
        """Returns whether this service computes the request's prompt itself, instead of handing it to a replica.

        It does if little is left to compute of this prompt and the short prompts computed already, together. So a burst
        of short prompts does not hold up the running rows. It computes at most one longer prompt at a time: any, while
        the service is degraded; else one of which every replica would have to compute several times as many tokens. An
        example is a long turn of a chat whose short turns were computed here: no replica has cached their KV.
        """
        is_degraded = self.is_degraded(now_s)
        if not (self._config.local_prefill_tokens or is_degraded):
            return False
        num_tokens = len(req.token_ids)
        num_left = num_tokens - self._pool.num_cached(req.usable_key)
        if num_left + self._local.num_short_left <= self._max_short_tokens(now_s):
            return True
        if self._local.has_long:
            return False
        if is_degraded:
            return True
        most_there = _WORTH_HOME * num_left
        return most_there <= num_tokens and most_there <= self._replicas.least_uncomputed(
            self._replicas.candidates(avoid=req.avoid_replica, num_tokens=num_tokens), req.usable_key, num_tokens
        )

    def _max_short_tokens(self, now_s: float) -> int:
        """Returns the most tokens that all short prompts computed here may have left, together."""
        return self._config.max_chunk_tokens if self.is_degraded(now_s) else self._config.local_prefill_tokens

    def _may_start_later(self, now_s: float) -> bool:
        """Returns whether a request later in turn may start although no replica takes an earlier one, because the later
        one is shorter.
        """
        has_ready = self._replicas.none_ready_since_s is None
        return has_ready or self._local.num_short_left < self._max_short_tokens(now_s)

    # ---- without replicas -----------------------------------------------------------------------------------------

    def is_degraded(self, now_s: float) -> bool:
        """Returns whether requests of any length are computed here, because no replica is ready."""
        return self.degraded_from_s <= now_s

    @property
    def degraded_from_s(self) -> float:
        """The time from which requests of any length are computed here, if no replica gets ready before. It is infinite
        if a replica is ready, or if the service computes only short prompts itself.
        """
        since_s = self._replicas.none_ready_since_s
        if since_s is None or not self._config.prefill_fallback:
            return math.inf
        return since_s + self._config.fallback_after_s

    def failure_of(self, req: Request, now_s: float) -> Failure | None:
        """Returns how the request fails if the replicas stay as they are; None if it does not. It fails at `now_s` if
        waiting cannot help.
        """
        if self.degraded_from_s < math.inf:
            return None
        if (since_s := self._replicas.none_ready_since_s) is not None:
            limit_s = max(since_s, req.since_s) + self._config.prefill_timeout_s
            return Failure(self._replicas.unavailable_error(), now_s if self._replicas.are_hopeless else limit_s)
        error = self._replicas.too_long_error(len(req.token_ids))
        if error is None or isinstance(error, ContextExceeded):
            return None if error is None else Failure(error, now_s)
        return Failure(error, self._refusal_limit_s(req, now_s), is_refusal=True)

    def is_given_up(self, lost: LostRow, now_s: float) -> bool:
        """Returns whether the request of a lost row fails instead of being retried. The caller has already counted the
        loss, or noted its first refusal.

        Lost handoffs are limited by their number. Refusals are limited by time, because a full or stopping replica
        refuses at once.
        """
        if not lost.is_retryable:
            return True
        if not lost.is_refusal:
            return lost.req.num_failures >= self._config.max_handoff_attempts
        # From `since_s` on a replica had the row, which does not count.
        return self.degraded_from_s == math.inf and self._refusal_limit_s(lost.req, now_s) <= lost.req.since_s

    def _refusal_limit_s(self, req: Request, now_s: float) -> float:
        """Returns the time `prefill_timeout_s` after the request's first refusal; without a refusal, after `now_s`."""
        since_s = now_s if req.refused_since_s is None else req.refused_since_s
        return since_s + self._config.prefill_timeout_s

    def is_excused(self, req: Request, now_s: float, *, was_short: bool) -> bool:
        """Returns whether the time since the last look at the queue does not count as waiting for a replica.

        It does not count if the request waited for this service's slots (`was_short`: too few were free), or for KV
        that is on its way for another request. A request that is too long for every replica waits for neither.
        """
        if req.refused_since_s is None or req.not_before_s > now_s:
            return False
        waits_here = was_short or req.awaited is not None
        return waits_here and self._replicas.too_long_error(len(req.token_ids)) is None
