"""Mutants that break invariants I1 and I5: sequence lengths."""

from __future__ import annotations

import dataclasses

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
from tests.engine.mutants.kinds import arguments_given


def twins_share_storage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_batch, "device_copy", lambda host, torch_device: host)


def relayed_twins_share_storage(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ScheduleBatch, seq_lens: Tensor) -> None:
        self.seq_lens = self.seq_lens_cpu = seq_lens

    patch.setattr(ScheduleBatch, "set_seq_lens", mutant)


def cpu_twin_not_updated(patch: pytest.MonkeyPatch) -> None:
    prepare = ScheduleBatch.prepare_for_decode

    def mutant(self: ScheduleBatch, pool: KvPool) -> bool:
        before = self.seq_lens_cpu
        prepared = prepare(self, pool)
        self.seq_lens_cpu = before
        return prepared

    patch.setattr(ScheduleBatch, "prepare_for_decode", mutant)


def lengths_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: RunningRows, rows: Rows, seq_lens: Rows, *, max_accept_len: int) -> NDArray[np.bool_]:
        return np.ones(rows.shape, dtype=np.bool_)

    patch.setattr(RunningRows, "can_have", mutant)


def sum_is_stale(patch: pytest.MonkeyPatch) -> None:
    """Gives each forward the `seq_lens_sum` of the launch before it."""
    sums = [0]
    snapshot = ScheduleBatch.snapshot

    def mutant(batch: ScheduleBatch) -> ForwardBatch:
        made = snapshot(batch)
        sums.append(made.seq_lens_sum)
        return dataclasses.replace(made, seq_lens_sum=sums[-2])

    patch.setattr(ScheduleBatch, "snapshot", mutant)


def _snapshot_aliases(patch: pytest.MonkeyPatch, column: str) -> None:
    snapshot = ScheduleBatch.snapshot

    def mutant(batch: ScheduleBatch) -> ForwardBatch:
        return dataclasses.replace(snapshot(batch), **{column: getattr(batch, column)})

    patch.setattr(ScheduleBatch, "snapshot", mutant)


def snapshot_aliases_lengths(patch: pytest.MonkeyPatch) -> None:
    _snapshot_aliases(patch, "seq_lens")


def snapshot_aliases_rows(patch: pytest.MonkeyPatch) -> None:
    _snapshot_aliases(patch, "req_pool_indices")


def snapshot_aliases_slots(patch: pytest.MonkeyPatch) -> None:
    _snapshot_aliases(patch, "out_cache_loc")


def lengths_changed_in_place(patch: pytest.MonkeyPatch) -> None:
    prepare = ScheduleBatch.prepare_for_decode

    def mutant(self: ScheduleBatch, pool: KvPool) -> bool:
        before, before_cpu = self.seq_lens, self.seq_lens_cpu
        prepared = prepare(self, pool)
        self.seq_lens = before.copy_(self.seq_lens)
        self.seq_lens_cpu = before_cpu.copy_(self.seq_lens_cpu)
        return prepared

    patch.setattr(ScheduleBatch, "prepare_for_decode", mutant)


def lengths_changed_in_place_under_the_forward(patch: pytest.MonkeyPatch) -> None:
    """Changes lengths in place: `seq_lens += 1` while the forward in flight reads the same tensor."""
    lengths_changed_in_place(patch)
    snapshot_aliases_lengths(patch)


def resolve_always_waits(patch: pytest.MonkeyPatch) -> None:
    given = arguments_given(patch, FutureMap)

    def mutant(self: FutureMap, rows: Tensor) -> None:
        given(self)["forward_stream"].record().synchronize(1.0)

    patch.setattr(FutureMap, "resolve_seq_lens", mutant)
