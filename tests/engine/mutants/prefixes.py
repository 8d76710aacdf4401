"""Mutants of the prefix cache: what rows hold of it, what they leave there, and what is asked of prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.kv.pool import CacheKey, KvPool, LeaseState, RowLease
from common.kv.prefix_tree import HeldPrefix, PrefixTree
from common.kv.slot_allocator import Slots
from common.prompts.awaited_kv import AwaitedKv
from common.wire.handoff import HandoffRow
from decode_service.messages import Phase, Submit
from decode_service.schedule import dispatcher, handoff_policy, request, scheduler
from decode_service.schedule.landing import LandingZone
from decode_service.schedule.life import RULES, Lives
from decode_service.schedule.request import Request
from tests.engine.mutants.kinds import instead_of, newest


def _tree_of(patch: pytest.MonkeyPatch) -> Callable[[HeldPrefix], PrefixTree]:
    """Records from now on which tree holds each prefix. Returns a function that looks it up."""
    hold = PrefixTree.hold
    trees: dict[HeldPrefix, PrefixTree] = {}

    def noting(self: PrefixTree, tokens: NDArray[np.int64], namespace: str, max_tokens: int) -> HeldPrefix:
        held = hold(self, tokens, namespace, max_tokens)
        trees[held] = self
        return held

    patch.setattr(PrefixTree, "hold", noting)
    return trees.__getitem__


def _let_go(lease: RowLease, tree_of: Callable[[HeldPrefix], PrefixTree]) -> None:
    if lease.prefix is not None:
        tree_of(lease.prefix).let_go(lease.prefix)
        lease.prefix = None


# ---- P1: how long a prefix is held ------------------------------------------------------------------------------


def prefix_is_found_and_not_held(patch: pytest.MonkeyPatch) -> None:
    """Stops holding a row's prefix as soon as the row is reserved."""
    tree_of, reserve = _tree_of(patch), KvPool.reserve

    def mutant(self: KvPool, num_tokens: int, **options: Any) -> RowLease | None:
        lease = reserve(self, num_tokens, **options)
        if lease is not None and lease.num_cached:
            _let_go(lease, tree_of)
        return lease

    patch.setattr(KvPool, "reserve", mutant)


def prefix_is_let_go_before_quarantine_ends(patch: pytest.MonkeyPatch) -> None:
    """Stops holding a row's prefix when the row is released, although forwards may still read it."""
    tree_of, release = _tree_of(patch), KvPool.release

    def mutant(self: KvPool, lease: RowLease) -> None:
        if lease.is_held:
            _let_go(lease, tree_of)
        release(self, lease)

    patch.setattr(KvPool, "release", mutant)


# ---- P2: what is asked for and landed ---------------------------------------------------------------------------


@instead_of(dispatcher, "HandoffRow")
def held_tokens_are_asked_for(row: type[HandoffRow], **columns: Any) -> HandoffRow:
    return row(**{**columns, "num_held_tokens": tuple((name, 0) for name, _ in columns["num_held_tokens"])})


@instead_of(LandingZone, "open")
def landing_awaits_held_tokens(
    open_call: Callable[..., None], self: LandingZone, call_id: str, replica: str, reqs: Sequence[Request]
) -> None:
    """Lets the landing zone wait for the KV of all tokens, those held included."""
    held = {req.lease: req.lease.num_cached for req in reqs if req.lease is not None}
    for lease in held:
        lease.num_cached = 0
    open_call(self, call_id, replica, reqs)
    for lease, num_cached in held.items():
        lease.num_cached = num_cached


@instead_of(PrefixTree, "hold")
def whole_prompt_may_be_held(
    hold: Callable[..., HeldPrefix], self: PrefixTree, tokens: NDArray[np.int64], namespace: str, max_tokens: int
) -> HeldPrefix:
    """Holds a cached prefix as long as the whole prompt, so that prefill has nothing to compute."""
    return hold(self, tokens, namespace, max_tokens + 1)


# ---- P3: conservation -------------------------------------------------------------------------------------------


@instead_of(PrefixTree, "evict")
def evicted_slot_leaks(evict: Callable[..., Slots], self: PrefixTree, num_slots: int) -> Slots:
    return evict(self, num_slots + 1)[:num_slots]


def shared_slots_are_freed_with_the_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowLease, "own_slots", property(lambda lease: lease.slots))


def kept_slots_stay_the_rows_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowLease, "share", lambda self, positions: None)


@instead_of(PrefixTree, "insert")
def slots_the_tree_has_already_leak(insert: Callable[..., int], *args: Any) -> int:
    """Counts all slots that are offered to the tree as the tree's own, even where it already has the same tokens in
    other slots.
    """
    insert(*args)
    return 0


# ---- P4: namespaces ---------------------------------------------------------------------------------------------


def namespaces_are_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "CacheKey", lambda token_ids, namespace: CacheKey(token_ids, ""))


@instead_of(Request, "of")
def no_salt_is_the_common_namespace(of: Callable[..., Request], submit: Submit, **about: Any) -> Request:
    return of(dataclasses.replace(submit, cache_salt=submit.cache_salt or ""), **about)


# ---- P5: what is kept is committed ------------------------------------------------------------------------------


@instead_of(KvPool, "keep")
def last_token_is_kept(
    keep: Callable[..., None], self: KvPool, lease: RowLease, token_ids: NDArray[np.int64], _: int
) -> None:
    """Keeps the KV of the last token too, which no forward has computed."""
    keep(self, lease, token_ids, len(token_ids))


@instead_of(KvPool, "keep")
def unread_tokens_are_kept(
    keep: Callable[..., None], self: KvPool, lease: RowLease, token_ids: NDArray[np.int64], _: int
) -> None:
    """Keeps the draft head's KV of tokens that the head has not read yet."""
    keep(self, lease, token_ids, len(token_ids) - 1)


def heads_kv_depends_on_no_later_token(patch: pytest.MonkeyPatch) -> None:
    """Shares the draft head's KV of a position also with sequences that have another token after it."""
    patch.setattr(scheduler, "PrefixTree", lambda lookahead: PrefixTree(0))


# ---- P6: retraction and eviction --------------------------------------------------------------------------------


def output_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Leaves only the prompt's KV, which came with the handoff, in the cache."""
    patch.setattr(KvPool, "keeps_output", False)


def evictable_slots_are_not_free(patch: pytest.MonkeyPatch) -> None:
    """Counts only those slots as free that belong neither to a row nor to the prefix cache."""
    patch.setattr(KvPool, "num_free_slots", property(lambda pool: pool.slot_counts().free))


def shared_slots_do_not_come_back(patch: pytest.MonkeyPatch) -> None:
    """Expects a leaving row to free only its own slots, and not those that it shares."""
    patch.setattr(PrefixTree, "num_held_only_by", lambda self, holds: 0)


# ---- P7: damaged KV ---------------------------------------------------------------------------------------------


def damaged_kv_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvPool, "forget", lambda self, lease: None)


def damaged_row_still_leaves_its_kv(patch: pytest.MonkeyPatch) -> None:
    """Forgets what is cached, but then caches what the damaged row wrote."""
    patch.setattr(RowLease, "is_damaged", property(lambda lease: False, lambda lease, is_damaged: None), raising=False)


def damaged_row_is_retried_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "avoid_cache", lambda self: None)


# ---- P8: lost handoffs --------------------------------------------------------------------------------------------


def a_retry_asks_for_what_the_first_attempt_did(patch: pytest.MonkeyPatch) -> None:
    first: dict[str, object] = {}

    def mutant(**columns: Any) -> HandoffRow:
        num_held = first.setdefault(columns["request_id"], columns["num_held_tokens"])
        return HandoffRow(**{**columns, "num_held_tokens": num_held})

    patch.setattr(dispatcher, "HandoffRow", mutant)


def half_landed_kv_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Caches the prompt's KV even when its handoff is lost and only a part of the KV has come."""
    enter, pool = Lives.enter, newest(patch, KvPool)

    def mutant(self: Lives, req: Request, phase: Phase, **about: Any) -> None:
        key = req.cache_key
        if phase is Phase.QUEUE and RULES[req.phase].lease is LeaseState.TRANSFERRING and key is not None:
            assert req.lease is not None
            pool().keep(req.lease, key.token_ids, len(key.token_ids) - 1)
        enter(self, req, phase, **about)

    patch.setattr(Lives, "enter", mutant)


# ---- P9: KV that is on its way --------------------------------------------------------------------------------


def nothing_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handoff_policy, "awaited_kv", lambda pool, key, sources, is_received: None)


def sources_are_waited_for_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Waits until the KV is in the cache, even if the request that should bring it has left."""
    patch.setattr(AwaitedKv, "is_over", property(lambda awaited: awaited.source.num_kept_tokens >= awaited.num_tokens))


def all_that_wait_are_sources(patch: pytest.MonkeyPatch) -> None:
    """Lets requests wait for KV from requests that hold no row."""
    patch.setattr(Request, "brings_kv", property(lambda req: not req.has_ended and req.running_in is None))
    admit = Lives.admit

    def mutant(self: Lives, submit: Submit) -> Request:
        req = admit(self, submit)
        self.bringing_kv[req] = None
        return req

    patch.setattr(Lives, "admit", mutant)


def all_kv_counts_as_brought_in_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "brings_it_in_chunks", True)


def kept_chunks_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "num_kept_tokens", 0)


def waiting_is_begun_at_each_look(patch: pytest.MonkeyPatch) -> None:
    """Searches for a request that brings the KV at each look at the queue, even while the KV of the one found is on its
    way.
    """
    patch.setattr(AwaitedKv, "is_over", True)
