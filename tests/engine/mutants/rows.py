"""Mutants that break invariants I9, I10 and I15: rows, slots and tensors that a stream may still touch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from common.kv.pool import KvPool, LeaseState, RowLease
from common.kv.slot_allocator import SlotAllocator
from common.wire.handoff import Frame, PrebuiltBatch
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.schedule.landing import LandingRow, LandingZone
from decode_service.schedule.request import LostRow, Request
from decode_service.schedule.running_rows import Rows
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.step import LaunchedStep, SealedStep
from tests.engine.mutants.kinds import instead_of, newest, use_not_noted

Release = Callable[[KvPool, RowLease], None]


@instead_of(KvPool, "release")
def quarantine_skipped(release: Release, self: KvPool, lease: RowLease) -> None:
    release(self, lease)
    with mock.patch.object(RowLease, "is_in_use", False):
        self.reclaim()


def quarantine_ends_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowLease, "is_in_use", False)


def launch_does_not_hold_its_rows(patch: pytest.MonkeyPatch) -> None:
    use_not_noted("forward")(patch)


def landing_does_not_hold_its_row(patch: pytest.MonkeyPatch) -> None:
    use_not_noted("landing")(patch)


def row_merged_before_its_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LandingRow, "has_landed", True)


def landing_into_a_released_row(patch: pytest.MonkeyPatch) -> None:
    """Lets the landing zone (which copies arriving KV into the pool) keep the row of a request that has ended."""
    patch.setattr(LandingZone, "forget", lambda self, req: None)


def waiting_segments_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Counts a row as landed once the copies started so far are done, although segments still wait for a copy."""
    patch.setattr(LandingRow, "num_waiting", property(lambda row: 0, lambda row, number: None))


@instead_of(LandingZone, "start_copies")
def waiting_segments_land_in_rows_given_up(start_copies: Callable[..., None], *args: Any) -> None:
    """Starts waiting copies as if every lease were held, whatever its state is."""
    with mock.patch.object(RowLease, "is_held", True):
        start_copies(*args)


def frames_matched_by_row_number_alone(patch: pytest.MonkeyPatch) -> None:
    """Matches a frame to a row by row number alone, so that it may reach a row of another call, such as an earlier
    attempt's.
    """

    opened: list[str] = []
    sound_open, take_frame = LandingZone.open, LandingZone.take_frame

    def noting(self: LandingZone, call_id: str, replica: str, reqs: Sequence[Request]) -> None:
        opened.append(call_id)
        sound_open(self, call_id, replica, reqs)

    def mutant(self: LandingZone, call_id: str, frame: Frame) -> list[LostRow]:
        rows = frame.rows.tolist() if isinstance(frame, PrebuiltBatch) else [getattr(frame, "row", -1)]
        with_row = (each for each in opened if any(self.request_of(each, row) is not None for row in rows))
        return take_frame(self, next(with_row, call_id), frame)

    patch.setattr(LandingZone, "open", noting)
    patch.setattr(LandingZone, "take_frame", mutant)


def grown_slot_leaks(patch: pytest.MonkeyPatch) -> None:
    """Loses one slot of each release: the last one, which the row was given when it last grew."""
    give_back = SlotAllocator.give_back
    patch.setattr(SlotAllocator, "give_back", lambda self, slots: give_back(self, slots[:-1]))


def slots_released_twice(patch: pytest.MonkeyPatch) -> None:
    """Releases a request's slots twice: when it ends, and again when its quarantine (the wait for forwards that may
    still write to them) ends.
    """
    release, slots = KvPool.release, newest(patch, SlotAllocator)

    def mutant(self: KvPool, lease: RowLease) -> None:
        if lease.is_held:
            slots().give_back(lease.slots)
        release(self, lease)

    patch.setattr(KvPool, "release", mutant)


@instead_of(KvPool, "release")
def aborted_row_leaks(release: Release, self: KvPool, lease: RowLease) -> None:
    if lease.state is not LeaseState.TRANSFERRING:
        release(self, lease)


@instead_of(LaunchedStep, "seal")
def tensors_dropped_before_the_end(seal: Callable[..., SealedStep], self: LaunchedStep, **given: Any) -> SealedStep:
    step = seal(self, **given)
    gone = dict.fromkeys(("req_pool_indices", "seq_lens", "positions", "out_cache_loc"))
    batch_left = dataclasses.replace(step.batch, **gone)  # type: ignore[arg-type]
    return dataclasses.replace(step, batch=batch_left, output=dataclasses.replace(step.output, kept=()))


def tensors_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    kept = []
    snapshot = ScheduleBatch.snapshot

    def mutant(batch: ScheduleBatch) -> ForwardBatch:
        kept.append(snapshot(batch))
        return kept[-1]

    patch.setattr(ScheduleBatch, "snapshot", mutant)


def live_table_rewritten(patch: pytest.MonkeyPatch) -> None:
    """Swaps the slots of a row's first two tokens whenever the row grows, in its lease and in the live table."""
    grow, reserve = KvPool.grow, KvPool.reserve
    leases: dict[int, RowLease] = {}

    def noting(self: KvPool, num_tokens: int, **options: Any) -> RowLease | None:
        if (lease := reserve(self, num_tokens, **options)) is not None:
            leases[lease.row] = lease
        return lease

    def mutant(self: KvPool, rows: Rows, num_tokens: Rows) -> bool:
        for lease in [leases[row] for row in rows.tolist()]:
            lease.slots[:2] = lease.slots[:2][::-1]
            self.rows.write(lease.row, 0, lease.slots[:2])
        return grow(self, rows, num_tokens)

    patch.setattr(KvPool, "reserve", noting)
    patch.setattr(KvPool, "grow", mutant)
