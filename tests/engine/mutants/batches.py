"""Mutants that break invariant I14: the order and the columns of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from decode_service.schedule.schedule_batch import ScheduleBatch
from tests.engine.mutants.kinds import Mutant, instead_of

COLUMNS = ("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "sampling_needs")


@instead_of(ScheduleBatch, "merge_batch")
def merge_reorders(merge: Callable[..., None], self: ScheduleBatch, other: ScheduleBatch) -> None:
    merge(other, self)
    self.__dict__ = other.__dict__


@instead_of(ScheduleBatch, "filter_batch")
def filter_reorders(filter_batch: Callable[..., None], self: ScheduleBatch, keep: Sequence[int]) -> None:
    filter_batch(self, keep[::-1])


def _keeping(operation: str, *columns: str) -> Mutant:
    """Returns a mutant in which an operation leaves columns as they are."""

    @instead_of(ScheduleBatch, operation)
    def keeps(original: Callable[..., None], self: ScheduleBatch, argument: object) -> None:
        kept = {name: vars(self)[name] for name in columns if name in vars(self)}
        original(self, argument)
        vars(self).update(kept)

    return keeps


def forgetful(operation: str, column: str) -> Mutant:
    """Returns a mutant in which `filter_batch` or `merge_batch` (`operation`) does not update one column."""
    forgets_a_column = _keeping(operation, column)
    forgets_a_column.__name__ = f"{operation}_forgets_{column}"
    return forgets_a_column


def filter_keeps_old_slots(patch: pytest.MonkeyPatch) -> None:
    _keeping("filter_batch", "out_cache_loc")(patch)


def what_follows_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Breaks filter and merge: the batch keeps the sampling needs and request names that it had when they were first
    read.
    """
    for operation in ("filter_batch", "merge_batch"):
        _keeping(operation, "rows", "request_ids", "undrafted", "sampling")(patch)
