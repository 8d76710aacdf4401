"""I9, I10, I15 broken: rows, slots and tensors that a stream may still touch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import pytest

from common.device.stream import Event, Stream
from common.kv.pool import KvPool, LeaseState, RowLease
from common.kv.row_columns import RowColumns
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.schedule import scheduler
from decode_service.schedule.landing import LandingZone, _LandingRow
from decode_service.schedule.request import Request
from decode_service.schedule.results import StepInFlight
from decode_service.schedule.running_rows import Rows
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.scheduler import DecodeEngine


def quarantine_skipped(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: KvPool, lease: RowLease) -> None:
        if not lease.is_held:
            return
        self._slots.give_back(lease.slots)
        lease.state = LeaseState.FREE
        del self._held[lease.row]
        self.rows.give_back(lease.row)

    patch.setattr(KvPool, "release", mutant)


def quarantine_ends_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowLease, "is_in_use", False)


def _use_not_noted(patch: pytest.MonkeyPatch, stream_name: str) -> None:
    use_until = RowColumns.use_until

    def mutant(self: RowColumns, rows: int | Rows, event: Event, stream: Stream) -> None:
        if stream.name != stream_name:
            use_until(self, rows, event, stream)

    patch.setattr(RowColumns, "use_until", mutant)


def launch_does_not_hold_its_rows(patch: pytest.MonkeyPatch) -> None:
    _use_not_noted(patch, "forward")


def landing_does_not_hold_its_row(patch: pytest.MonkeyPatch) -> None:
    _use_not_noted(patch, "landing")


def row_merged_before_its_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_LandingRow, "has_landed", True)


def landing_into_a_released_row(patch: pytest.MonkeyPatch) -> None:
    """The landing zone keeps the row of a request that ended."""
    patch.setattr(LandingZone, "forget", lambda self, req: None)


def waiting_segments_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A row has landed once the copies that were started are done, whatever has still to be."""
    patch.setattr(_LandingRow, "num_waiting", property(lambda row: 0, lambda row, number: None))


class _HeldForEver:
    """A row's lease, to whoever is to look whether it is held."""

    is_held = True

    def __init__(self, lease: RowLease) -> None:
        vars(self)["_lease"] = lease

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._lease, name, value)


class _DeafLanding(LandingZone):
    """Is given leases that never end."""

    def open(self, call_id: str, replica: str, reqs: Sequence[Request]) -> None:
        leases = [req.lease for req in reqs]
        for req in reqs:
            req.lease = cast(RowLease, _HeldForEver(cast(RowLease, req.lease)))
        super().open(call_id, replica, reqs)
        for req, lease in zip(reqs, leases, strict=True):
            req.lease = lease


def waiting_segments_land_in_rows_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "LandingZone", _DeafLanding)


def frames_matched_by_row_number_alone(patch: pytest.MonkeyPatch) -> None:
    """A frame finds a row of another call, such as an earlier attempt's."""

    def mutant(self: LandingZone, call_id: str, index: int) -> object:
        return next((call.rows[index] for call in self._calls.values() if index in call.rows), None)

    patch.setattr(LandingZone, "_row", mutant)


def grown_slot_leaks(patch: pytest.MonkeyPatch) -> None:
    release = KvPool.release

    def mutant(self: KvPool, lease: RowLease) -> None:
        if lease.state is LeaseState.RUNNING:
            self._columns.num_slots[lease.row] -= 1
        release(self, lease)

    patch.setattr(KvPool, "release", mutant)


def slots_released_twice(patch: pytest.MonkeyPatch) -> None:
    """When a request ends, and again when quarantine does."""
    release = KvPool.release

    def mutant(self: KvPool, lease: RowLease) -> None:
        if lease.is_held:
            self._slots.give_back(lease.slots)
        release(self, lease)

    patch.setattr(KvPool, "release", mutant)


def aborted_row_leaks(patch: pytest.MonkeyPatch) -> None:
    release = KvPool.release

    def mutant(self: KvPool, lease: RowLease) -> None:
        if lease.state is not LeaseState.TRANSFERRING:
            release(self, lease)

    patch.setattr(KvPool, "release", mutant)


def tensors_dropped_before_the_end(patch: pytest.MonkeyPatch) -> None:
    launch = DecodeEngine._launch

    def mutant(self: DecodeEngine, batch: ScheduleBatch) -> StepInFlight:
        step = launch(self, batch)
        gone = dict.fromkeys(("req_pool_indices", "seq_lens", "positions", "out_cache_loc"))
        batch_left = dataclasses.replace(step.batch, **gone)  # type: ignore[arg-type]
        return dataclasses.replace(step, batch=batch_left, output=dataclasses.replace(step.output, kept=()))

    patch.setattr(DecodeEngine, "_launch", mutant)


def tensors_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    kept = []
    snapshot = ScheduleBatch.snapshot

    def mutant(batch: ScheduleBatch) -> ForwardBatch:
        kept.append(snapshot(batch))
        return kept[-1]

    patch.setattr(ScheduleBatch, "snapshot", mutant)


def live_table_rewritten(patch: pytest.MonkeyPatch) -> None:
    """Growing a row also moves its first two tokens to each other's slots, in the lease and in the table."""
    grow = KvPool.grow

    def mutant(self: KvPool, rows: Rows, num_tokens: Rows) -> bool:
        for lease in [self._held[row] for row in rows.tolist()]:
            lease.slots[:2] = lease.slots[:2][::-1]
            self.rows.write(lease.row, 0, lease.slots[:2])
        return grow(self, rows, num_tokens)

    patch.setattr(KvPool, "grow", mutant)
