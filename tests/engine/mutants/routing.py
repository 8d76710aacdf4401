"""Mutants of the choice of a prefill replica: which replicas are chosen, and what they are assumed to have cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from decode_service.messages import Replica, ReplicasChanged
from decode_service.schedule.replica_set import KnownPrefixes, ReplicaSet
from tests.engine.mutants.kinds import instead_of


def _heard_as(patch: pytest.MonkeyPatch, change: Callable[[Replica], Replica]) -> None:
    update = ReplicaSet.update

    def mutant(self: ReplicaSet, changed: ReplicasChanged, now_s: float, **outstanding: Any) -> None:
        update(self, replace(changed, replicas=tuple(map(change, changed.replicas))), now_s, **outstanding)

    patch.setattr(ReplicaSet, "update", mutant)


def replicas_that_are_not_ready_are_chosen(patch: pytest.MonkeyPatch) -> None:
    """Treats a replica that no longer answers as ready."""
    _heard_as(patch, lambda replica: replace(replica, is_ready=True, instance_id="first"))


def a_new_process_is_taken_for_the_old_one(patch: pytest.MonkeyPatch) -> None:
    _heard_as(patch, lambda replica: replace(replica, instance_id=""))


def load_counts_nothing(patch: pytest.MonkeyPatch) -> None:
    """Chooses the replica by cached tokens alone, however long its queue is."""
    _heard_as(patch, lambda replica: replace(replica, num_uncomputed_tokens=0))


@instead_of(KnownPrefixes, "update")
def all_evicted_tokens_were_sent_from_here(
    update: Callable[..., None], self: KnownPrefixes, replica: Replica, **outstanding: Any
) -> None:
    """Forgets as many cached tokens as the replica evicted, as if no other decode service filled its cache."""
    with mock.patch.object(KnownPrefixes, "num_tokens", replica.max_cached_tokens):
        update(self, replica, **outstanding)


def room_draws_no_row(patch: pytest.MonkeyPatch) -> None:
    """Sends a row to a replica that must evict KV for it, although an idle replica has free slots."""
    _heard_as(patch, lambda replica: replace(replica, num_free_slots=0))


def evictions_are_not_heard_of(patch: pytest.MonkeyPatch) -> None:
    _heard_as(patch, lambda replica: replace(replica, num_evicted_tokens=0))


@instead_of(ReplicaSet, "update")
def rows_never_end(
    update: Callable[..., None], self: ReplicaSet, changed: ReplicasChanged, now_s: float, **_: object
) -> None:
    """Counts each row that was handed to a replica as still to be computed there."""
    update(self, changed, now_s, num_outstanding={replica.address: 1 << 40 for replica in changed.replicas})
