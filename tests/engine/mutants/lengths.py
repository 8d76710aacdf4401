"""Mutants that break invariants I1 and I5: sequence lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from common.kv.pool import KvPool
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap
from decode_service.schedule import schedule_batch
from decode_service.schedule.running_rows import Rows, RunningRows
from decode_service.schedule.schedule_batch import ScheduleBatch
from tests.engine.mutants.kinds import Mutant, arguments_given, instead_of


def twins_share_storage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_batch, "device_copy", lambda host, torch_device: host)


@instead_of(ScheduleBatch, "set_seq_lens")
def relayed_twins_share_storage(_: object, self: ScheduleBatch, seq_lens: Tensor) -> None:
    self.seq_lens = self.seq_lens_cpu = seq_lens


@instead_of(ScheduleBatch, "prepare_for_decode")
def cpu_twin_not_updated(prepare: Callable[..., bool], self: ScheduleBatch, pool: KvPool) -> bool:
    before = self.seq_lens_cpu
    prepared = prepare(self, pool)
    self.seq_lens_cpu = before
    return prepared


@instead_of(RunningRows, "can_have")
def lengths_are_not_looked_at(
    _: object, self: RunningRows, rows: Rows, *lengths: Rows, **limit: int
) -> NDArray[np.bool_]:
    return np.ones(rows.shape, dtype=np.bool_)


def sum_is_stale(patch: pytest.MonkeyPatch) -> None:
    """Gives each forward the `seq_lens_sum` of the launch before it."""
    sums = [0]
    snapshot = ScheduleBatch.snapshot

    def mutant(batch: ScheduleBatch) -> ForwardBatch:
        made = snapshot(batch)
        sums.append(made.seq_lens_sum)
        return dataclasses.replace(made, seq_lens_sum=sums[-2])

    patch.setattr(ScheduleBatch, "snapshot", mutant)


def _snapshot_aliases(column: str) -> Mutant:
    @instead_of(ScheduleBatch, "snapshot")
    def aliases(snapshot: Callable[..., ForwardBatch], batch: ScheduleBatch) -> ForwardBatch:
        return dataclasses.replace(snapshot(batch), **{column: getattr(batch, column)})

    return aliases


def snapshot_aliases_lengths(patch: pytest.MonkeyPatch) -> None:
    _snapshot_aliases("seq_lens")(patch)


def snapshot_aliases_rows(patch: pytest.MonkeyPatch) -> None:
    _snapshot_aliases("req_pool_indices")(patch)


def snapshot_aliases_rows_on_the_host(patch: pytest.MonkeyPatch) -> None:
    _snapshot_aliases("rows")(patch)


def snapshot_aliases_slots(patch: pytest.MonkeyPatch) -> None:
    _snapshot_aliases("out_cache_loc")(patch)


@instead_of(ScheduleBatch, "prepare_for_decode")
def lengths_changed_in_place(prepare: Callable[..., bool], self: ScheduleBatch, pool: KvPool) -> bool:
    before, before_cpu = self.seq_lens, self.seq_lens_cpu
    prepared = prepare(self, pool)
    self.seq_lens = before.copy_(self.seq_lens)
    self.seq_lens_cpu = before_cpu.copy_(self.seq_lens_cpu)
    return prepared


def lengths_changed_in_place_under_the_forward(patch: pytest.MonkeyPatch) -> None:
    """Changes lengths in place: `seq_lens += 1` while the forward in flight reads the same tensor."""
    lengths_changed_in_place(patch)
    snapshot_aliases_lengths(patch)


def resolve_always_waits(patch: pytest.MonkeyPatch) -> None:
    given = arguments_given(patch, FutureMap)

    def mutant(self: FutureMap, rows: Tensor) -> None:
        given(self)["forward_stream"].record().synchronize(1.0)

    patch.setattr(FutureMap, "resolve_seq_lens", mutant)
