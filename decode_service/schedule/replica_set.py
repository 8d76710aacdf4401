"""The prefill replicas: what is known of each, and the choice of the one that a row is handed to.

    cost of a replica = tokens of the row that it has to compute + tokens that it has to compute before them

While some idle replica has room for the row, the costs of the others also count tokens that they would have to evict.
What a replica has cached is known from the rows that were handed to it and from the number of tokens that it says it
evicted. It is an estimate, and a wrong one costs time only: the replica computes what it does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import BatonError, ContextExceeded, FingerprintMismatch, PrefillUnavailable
from common.kv.pool import CacheKey
from common.kv.prefix_tree import PrefixTree
from decode_service.messages import Replica, ReplicasChanged

MAX_KNOWN_TOKENS = 1 << 22
"""The most tokens that this service remembers as cached at one replica. Each takes 16 bytes here."""

_EVICTION_COST = 3
"""An evicted token costs as much as computing this many, while some idle replica has room for the row. So a full idle
replica gets the row only if at most a quarter of the row's tokens are not cached there.
"""


@dataclass(frozen=True, slots=True)
class Route:
    """The choice for one row: the address of its replica, how many of its first tokens are expected to be cached there,
    and how many are left for the replica to compute.
    """

    replica: str
    num_cached: int
    num_uncomputed: int


class KnownPrefixes:
    """The prompts that one process of a replica has cached, as far as this service knows.

    A prompt counts as cached from its handoff on: if another one with the same beginning comes while the replica
    computes it, the replica lets that one wait for its KV. A prompt that was refused or lost still counts, until it is
    evicted here.
    """

    def __init__(self, replica: Replica, *, lookahead: int) -> None:
        self.instance_id = replica.instance_id
        self._tree = PrefixTree(lookahead)  # its slots are only counted
        self._max_tokens = replica.max_cached_tokens
        self._num_evicted = replica.num_evicted_tokens
        self._num_made_room = 0  # tokens that `add` evicted, and that the replica has not reported as evicted yet
        self._num_unreported = 0  # tokens of the rows for which the next report may tell of evictions

    @property
    def num_tokens(self) -> int:
        return self._tree.num_slots

    @property
    def has_cache(self) -> bool:
        """Whether the replica keeps KV for later rows."""
        return self._max_tokens > 0

    @property
    def fullness(self) -> float:
        """The number of known tokens, divided by the number that the replica can keep; infinite if it keeps none."""
        return self.num_tokens / self._max_tokens if self.has_cache else math.inf

    def num_cached(self, key: CacheKey | None) -> int:
        """Returns how many tokens of a row with `key` the replica is expected to find cached: at most all but one."""
        if key is None:
            return 0
        return min(self._tree.match(key.token_ids, key.namespace).num_tokens, len(key.token_ids) - 1)

    def add(self, key: CacheKey | None) -> None:
        """Notes that the replica will have the tokens of `key` cached. Evicts other tokens if the replica cannot keep
        all.
        """
        if key is None:
            return
        lookahead, num_kept = self._tree.lookahead, min(self._max_tokens, MAX_KNOWN_TOKENS)
        stop = min(len(key.token_ids) - lookahead, num_kept)
        held = self._tree.hold(key.token_ids, key.namespace, max(stop, 0))
        self._tree.use(held)
        if (start := held.num_tokens) < stop:
            self._tree.insert(held, key.token_ids[start : stop + lookahead], np.zeros(stop - start, np.int64))
            self._num_made_room += len(self._tree.evict(max(self._tree.num_slots - num_kept, 0)))
            self._num_unreported += stop - start
        self._tree.let_go(held)

    def update(self, replica: Replica, *, num_outstanding: int) -> None:
        """Forgets known tokens as the replica reports evictions, those used least recently first.

        The replica also keeps tokens that other services handed to it. So of the tokens that it evicted since the last
        update only a share is taken from the known ones: the number of known tokens divided by the number that it can
        keep. What `add` has already evicted to make room counts as part of that share, even if several reports tell of
        it.

        `num_outstanding` counts the tokens that the replica is still to compute for this service's rows. For all other
        rows it has evicted already, or never will because they were refused, lost or cancelled. So room that `add` made
        for rows that had ended before the last update no longer counts.
        """
        self._num_made_room = min(self._num_made_room, self._num_unreported)
        self._num_unreported = num_outstanding
        num_evicted = max(replica.num_evicted_tokens - self._num_evicted, 0)
        self._num_evicted, self._max_tokens = replica.num_evicted_tokens, replica.max_cached_tokens
        if num_evicted:
            num_shared = math.ceil(num_evicted * self.num_tokens / max(self._max_tokens, 1))
            num_done = min(num_shared, self._num_made_room)
            self._num_made_room -= num_done
            self._tree.evict(num_shared - num_done)


@dataclass(frozen=True, slots=True)
class _Offer:
    """The cost of handing a row to one replica, in tokens: `num_uncomputed` that the replica has to compute for the
    row, `num_before` that it has to compute before those, and `num_evicted` cached ones that it must evict for the row.
    """

    address: str
    known: KnownPrefixes
    num_uncomputed: int
    num_before: int
    num_evicted: int

    @property
    def has_room_now(self) -> bool:
        """Whether the replica can begin with the row at once, and can keep its KV without evicting anything."""
        return self.known.has_cache and not self.num_before and not self.num_evicted


class ReplicaSet:
    """The prefill replicas as last reported.

    `none_ready_since_s` is the time, by the engine's clock, since which no replica is ready, or None while one is
    ready. `num_known_tokens` maps the address of each replica that was ever ready to the number of tokens that it is
    expected to have cached; the mapping is replaced, never changed. `lookahead` is the number of tokens after a
    position on which the KV of that position depends: 0 without a draft head. Without `routes_by_prefix` rows are
    routed as if nothing were cached.
    """

    def __init__(self, *, now_s: float, lookahead: int, routes_by_prefix: bool) -> None:
        self._lookahead = lookahead
        self._routes_by_prefix = routes_by_prefix
        self._known: dict[str, KnownPrefixes] = {}  # by address
        self.num_known_tokens: Mapping[str, int] = {}
        self._num_of_others: dict[str, int] = {}  # tokens that a replica is to compute for others, by address
        self._replicas: tuple[Replica, ...] = ()
        self._others_may_come = False
        self._most_tokens_ever = 0.0
        self._none_ready_since_s: float | None = now_s

    def update(self, changed: ReplicasChanged, now_s: float, *, num_outstanding: Mapping[str, int]) -> None:
        """Takes the replicas' new states.

        `num_outstanding` says for each address how many tokens the replica is to compute for this service's rows. If
        the replica itself reports more, the rest belongs to other services, and counts until its next report.
        """
        self._num_of_others = {
            replica.address: self._num_of_others[replica.address]
            if replica in self._replicas
            else max(replica.num_uncomputed_tokens - num_outstanding.get(replica.address, 0), 0)
            for replica in changed.replicas
        }
        self._known = {
            replica.address: known
            for replica in changed.replicas
            if (known := self._known_of(replica, num_outstanding.get(replica.address, 0))) is not None
        }
        self._replicas, self._others_may_come = changed.replicas, changed.others_may_come
        self.num_known_tokens = {address: known.num_tokens for address, known in self._known.items()}
        limits = [replica.max_context_tokens or math.inf for replica in changed.replicas if replica.is_ready]
        self._most_tokens_ever = max([self._most_tokens_ever, *limits])
        if any(replica.is_ready for replica in changed.replicas):
            self._none_ready_since_s = None
        elif self._none_ready_since_s is None:
            self._none_ready_since_s = now_s

    @property
    def none_ready_since_s(self) -> float | None:
        return self._none_ready_since_s

    def _known_of(self, replica: Replica, num_outstanding: int) -> KnownPrefixes | None:
        """Returns what is known of the process that serves at the replica's address, or None if none was ready there
        yet.

        It stays known while the replica is not ready, because the same process may become ready again with all its
        cached KV.
        """
        known = self._known.get(replica.address)
        if not replica.is_ready:
            return known
        if known is None or known.instance_id != replica.instance_id:
            return KnownPrefixes(replica, lookahead=self._lookahead)
        if replica not in self._replicas:  # otherwise its last report is repeated, because another replica's changed
            known.update(replica, num_outstanding=num_outstanding)
        return known

    def is_ready(self, address: str) -> bool:
        return any(replica.is_ready for replica in self._replicas if replica.address == address)

    def candidates(self, *, avoid: str, num_tokens: int) -> Sequence[Replica]:
        """Returns the ready replicas that take rows of `num_tokens` tokens.

        The replica at the address `avoid` is left out if there are others.
        """
        ready = [replica for replica in self._replicas if replica.is_ready and replica.takes(num_tokens)]
        return [replica for replica in ready if replica.address != avoid] or ready

    def route(
        self,
        candidates: Sequence[Replica],
        key: CacheKey | None,
        *,
        uses_cached: bool = True,
        num_tokens: int,
        num_outstanding: Mapping[str, int],
    ) -> Route:
        """Chooses one of `candidates`, which are not empty, for a row of `num_tokens` tokens.

        `key` is the row's key in the prefix cache; None if it uses none. Without `uses_cached` the row is computed as a
        whole, whatever is cached. `num_outstanding` says for each address how many tokens the replica is to compute for
        this service's rows. Among replicas of equal cost the one that computes least is chosen, and then the one whose
        cache is least full, so that idle replicas fill evenly.

        While some idle replica has room for the row, tokens that the others would have to evict for it cost more.
        Otherwise all conversations with one beginning would share the cache of one replica, if they come one after the
        other. A busy replica's room counts for nothing: otherwise that replica would get all rows until it is full.
        """
        usable = key if uses_cached and self._routes_by_prefix else None
        offers = [self._offer(replica, usable, num_tokens, num_outstanding) for replica in candidates]
        counts_evictions = any(offer.has_room_now for offer in offers)

        def costs(offer: _Offer) -> tuple[int, int, float]:
            num_lost = _EVICTION_COST * offer.num_evicted if counts_evictions else 0
            cost = offer.num_uncomputed + offer.num_before + num_lost
            return cost, offer.num_uncomputed, offer.known.fullness

        best = min(offers, key=costs)
        return Route(best.address, num_tokens - best.num_uncomputed, best.num_uncomputed)

    def add(self, address: str, key: CacheKey | None) -> None:
        """Notes that the replica at `address` will have the tokens of `key` cached."""
        if self._routes_by_prefix:
            known = self._known[address]
            known.add(key)
            self.num_known_tokens = {**self.num_known_tokens, address: known.num_tokens}

    def least_uncomputed(self, candidates: Sequence[Replica], key: CacheKey | None, num_tokens: int) -> int:
        """Returns how many of a row's `num_tokens` tokens the candidate that has cached the most would have to compute.

        Returns 0 if there are no candidates, or if rows are not routed by prefix, so that nothing is known.
        """
        if not self._routes_by_prefix:
            return 0
        known = [self._known[replica.address] for replica in candidates]
        return min([num_tokens - each.num_cached(key) for each in known], default=0)

    def _offer(
        self, replica: Replica, key: CacheKey | None, num_tokens: int, num_outstanding: Mapping[str, int]
    ) -> _Offer:
        known = self._known[replica.address]
        num_uncomputed = num_tokens - known.num_cached(key)
        return _Offer(
            replica.address,
            known,
            num_uncomputed=num_uncomputed,
            num_before=num_outstanding.get(replica.address, 0) + self._num_of_others[replica.address],
            num_evicted=max(num_uncomputed - replica.num_free_slots, 0),
        )

    def too_long_error(self, num_tokens: int) -> BatonError | None:
        """Returns the error of a row of `num_tokens` tokens that is too long for every ready replica. Returns None if
        one takes it, or if none is ready.

        The error is PrefillUnavailable if waiting may help: if some replica is not ready, or if other replicas may come
        and one that took so many tokens was ready before. Otherwise it is ContextExceeded.
        """
        ready = [replica for replica in self._replicas if replica.is_ready]
        if not ready or any(replica.takes(num_tokens) for replica in ready):
            return None
        limit = max(replica.max_context_tokens or 0 for replica in ready)
        message = f"{num_tokens} tokens are more than any prefill replica takes: the largest takes {limit}"
        one_may_come = self._others_may_come and num_tokens <= self._most_tokens_ever
        if len(ready) == len(self._replicas) and not one_may_come:
            return ContextExceeded("prompt", message, max_context_tokens=limit, num_prompt_tokens=num_tokens)
        causes = self.causes
        return PrefillUnavailable(message + (f", and {causes}" if causes else ""))

    @property
    def are_hopeless(self) -> bool:
        """Whether no replica will ever serve: all have a different fingerprint, and no others may come."""
        return self._mismatch is not None and not self._others_may_come

    def unavailable_error(self) -> BatonError:
        """Returns the error of a request while no replica is ready: FingerprintMismatch if all have a different
        fingerprint, else PrefillUnavailable.
        """
        if (mismatch := self._mismatch) is not None:
            return mismatch
        causes = self.causes
        return PrefillUnavailable("no prefill replica is ready" + (f" ({causes})" if causes else ""))

    @property
    def causes(self) -> str:
        """The addresses of the replicas that are not ready, each with the reason, as one text."""
        return "; ".join(f"{r.address}: {r.error or 'is not ready'}" for r in self._replicas if not r.is_ready)

    @property
    def _mismatch(self) -> FingerprintMismatch | None:
        errors = [replica.error for replica in self._replicas]
        mismatches = [error for error in errors if isinstance(error, FingerprintMismatch)]
        return mismatches[0] if mismatches and len(mismatches) == len(errors) else None
