"""Mutants that break invariant I14: the order and the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decode_service.schedule.schedule_batch import ScheduleBatch
from tests.engine.mutants.kinds import Mutant


def merge_reorders(patch: pytest.MonkeyPatch) -> None:
    merge = ScheduleBatch.merge_batch

    def mutant(self: ScheduleBatch, other: ScheduleBatch) -> None:
        merge(other, self)
        self.__dict__ = other.__dict__

    patch.setattr(ScheduleBatch, "merge_batch", mutant)


def _forgets(patch: pytest.MonkeyPatch, operation: str, column: str) -> None:
    original = getattr(ScheduleBatch, operation)

    def mutant(self: ScheduleBatch, argument: object) -> None:
        before = getattr(self, column)
        original(self, argument)
        setattr(self, column, before)

    patch.setattr(ScheduleBatch, operation, mutant)


COLUMNS = ("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "draft_lag", "sampling_needs")


def forgetful(operation: str, column: str) -> Mutant:
    """Returns a mutant in which `filter_batch` or `merge_batch` (`operation`) does not update one column."""

    def forgets_a_column(patch: pytest.MonkeyPatch) -> None:
        _forgets(patch, operation, column)

    forgets_a_column.__name__ = f"{operation}_forgets_{column}"
    return forgets_a_column


def _keeps(patch: pytest.MonkeyPatch, operation: str, names: Sequence[str]) -> None:
    original = getattr(ScheduleBatch, operation)

    def mutant(self: ScheduleBatch, argument: object) -> None:
        kept = {name: vars(self)[name] for name in names if name in vars(self)}
        original(self, argument)
        vars(self).update(kept)

    patch.setattr(ScheduleBatch, operation, mutant)


def filter_keeps_old_slots(patch: pytest.MonkeyPatch) -> None:
    _forgets(patch, "filter_batch", "out_cache_loc")


def what_follows_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Breaks filter and merge: the batch keeps the sampling needs and request names that it had when they were first
    read.
    """
    for operation in ("filter_batch", "merge_batch"):
        _keeps(patch, operation, ("rows", "request_ids", "undrafted", "sampling"))


def filter_reorders(patch: pytest.MonkeyPatch) -> None:
    original = ScheduleBatch.filter_batch

    def mutant(self: ScheduleBatch, keep: Sequence[int]) -> None:
        original(self, keep[::-1])

    patch.setattr(ScheduleBatch, "filter_batch", mutant)
