"""Mutants of the choice of a prefill replica: which are chosen, and what they are taken to have cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decode_service.messages import Replica, ReplicasChanged
from decode_service.schedule.replica_set import ReplicaSet


def _heard_as(patch: pytest.MonkeyPatch, change: Callable[[Replica], Replica]) -> None:
    update = ReplicaSet.update

    def mutant(self: ReplicaSet, changed: ReplicasChanged, now_s: float, **outstanding: Any) -> None:
        update(self, replace(changed, replicas=tuple(map(change, changed.replicas))), now_s, **outstanding)

    patch.setattr(ReplicaSet, "update", mutant)


def replicas_that_are_not_ready_are_chosen(patch: pytest.MonkeyPatch) -> None:
    """Take a replica that stopped to answer for one that is still ready."""
    _heard_as(patch, lambda replica: replace(replica, is_ready=True, instance_id="first"))


def a_new_process_is_taken_for_the_old_one(patch: pytest.MonkeyPatch) -> None:
    _heard_as(patch, lambda replica: replace(replica, instance_id=""))


def evictions_are_not_heard_of(patch: pytest.MonkeyPatch) -> None:
    _heard_as(patch, lambda replica: replace(replica, num_evicted_tokens=0))


def rows_never_end(patch: pytest.MonkeyPatch) -> None:
    """Take each row that was handed to a replica for one that it has still to compute."""
    update = ReplicaSet.update

    def mutant(self: ReplicaSet, changed: ReplicasChanged, now_s: float, **outstanding: Any) -> None:
        update(self, changed, now_s, num_outstanding={replica.address: 1 << 40 for replica in changed.replicas})

    patch.setattr(ReplicaSet, "update", mutant)
