"""The engine with one rule taken out, one function a rule: each must make the rule's check fail."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.device.cell import Cell
from common.device.scripted import ScriptedEvent, ScriptedStream
from common.device.stream import Event, Scope, Work
from common.kv.pool import KvPool, LeaseState, RowLease
from common.kv.row_table import ReqToTokenPool
from common.model import noise, sampling
from decode_service import schedule_batch
from decode_service.future_map import FutureMap, RelayPayload
from decode_service.landing import LandingZone
from decode_service.schedule_batch import ForwardBatch, ScheduleBatch
from decode_service.scheduler import DecodeEngine
from decode_service.step_in_flight import RowResult, StepInFlight
from decode_service.worker import PlainWorker, WorkerOutput

Check = Callable[[], None]
Mutant = Callable[[pytest.MonkeyPatch], None]


def name_of(value: object) -> str:
    """Test ids: a check's or a mutant's name; nothing for a symptom."""
    return getattr(value, "__name__", "-")


# ---- I1, I5: lengths --------------------------------------------------------------------------------------------


def twins_share_storage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_batch, "_device_copy", lambda host, torch_device: host)


def relayed_twins_share_storage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_batch, "_host_copy", lambda tensor: tensor)


def cpu_twin_not_updated(patch: pytest.MonkeyPatch) -> None:
    prepare = ScheduleBatch.prepare_for_decode

    def mutant(self: ScheduleBatch, pool: KvPool) -> bool:
        before = self.seq_lens_cpu
        prepared = prepare(self, pool)
        self.seq_lens_cpu = before
        return prepared

    patch.setattr(ScheduleBatch, "prepare_for_decode", mutant)


def lengths_not_checked_at_launch(patch: pytest.MonkeyPatch) -> None:
    snapshot = ForwardBatch.snapshot

    def mutant(batch: ScheduleBatch) -> ForwardBatch:
        lengths = batch.seq_lens_cpu
        batch.seq_lens_cpu = lengths.clamp(min=1)
        try:
            return snapshot(batch)
        finally:
            batch.seq_lens_cpu = lengths

    patch.setattr(ForwardBatch, "snapshot", mutant)


def _snapshot_aliases(patch: pytest.MonkeyPatch, column: str) -> None:
    snapshot = ForwardBatch.snapshot

    def mutant(batch: ScheduleBatch) -> ForwardBatch:
        return dataclasses.replace(snapshot(batch), **{column: getattr(batch, column)})

    patch.setattr(ForwardBatch, "snapshot", mutant)


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
    """The classic: `seq_lens += 1` while the forward in flight reads the same tensor."""
    lengths_changed_in_place(patch)
    snapshot_aliases_lengths(patch)


def resolve_always_waits(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: FutureMap, batch: ScheduleBatch) -> None:
        self._forward_stream.record().synchronize(1.0)

    patch.setattr(FutureMap, "resolve_seq_lens", mutant)


# ---- I2: relay rows ---------------------------------------------------------------------------------------------


def relay_is_a_ring(patch: pytest.MonkeyPatch) -> None:
    """Tokens go to the next places of a ring that is shorter than the number of requests that can run."""
    places: dict[int, int] = {}
    counter = itertools.count()
    stash, bootstrap, resolve = FutureMap.stash, FutureMap.bootstrap, FutureMap.resolve_forward_inputs

    def advance(rows: Tensor) -> Tensor:
        for row in rows.tolist():
            places[row] = 1 + next(counter) % 3
        return current(rows)

    def current(rows: Tensor) -> Tensor:
        return torch.tensor([places[row] for row in rows.tolist()], dtype=torch.int64)

    def mutant_stash(self: FutureMap, rows: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        stash(self, advance(rows), payload, scope)

    def mutant_bootstrap(self: FutureMap, prebuilt: ScheduleBatch, payload: RelayPayload) -> None:
        bootstrap(self, _at(prebuilt, advance(prebuilt.req_pool_indices)), payload)

    def mutant_forward(self: PlainWorker, batch: ForwardBatch, *, future_map: FutureMap, **rest: Any) -> WorkerOutput:
        rows = current(batch.req_pool_indices)
        ring = SimpleNamespace(resolve_forward_inputs=lambda _: resolve(future_map, rows))
        return forward(self, batch, future_map=ring, **rest)  # type: ignore[arg-type]

    forward = PlainWorker.forward
    patch.setattr(FutureMap, "stash", mutant_stash)
    patch.setattr(FutureMap, "bootstrap", mutant_bootstrap)
    patch.setattr(PlainWorker, "forward", mutant_forward)


def _at(batch: ScheduleBatch, rows: Tensor) -> ScheduleBatch:
    """The same batch at other relay rows."""
    return ScheduleBatch(
        reqs=batch.reqs,
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
        forward_mode=batch.forward_mode,
    )


def _after_making_the_relay(patch: pytest.MonkeyPatch, change: Callable[[FutureMap], None]) -> None:
    init = FutureMap.__init__

    def mutant(self: FutureMap, **arguments: Any) -> None:
        init(self, **arguments)
        change(self)

    patch.setattr(FutureMap, "__init__", mutant)


def relay_without_padding_row(patch: pytest.MonkeyPatch) -> None:
    def drop_row_zero(future_map: FutureMap) -> None:
        future_map.output_tokens = future_map.output_tokens[1:]

    _after_making_the_relay(patch, drop_row_zero)


def row_zero_is_given_out(patch: pytest.MonkeyPatch) -> None:
    init = ReqToTokenPool.__init__

    def mutant(self: ReqToTokenPool, **arguments: Any) -> None:
        init(self, **arguments)
        self._free = [row - 1 for row in self._free]

    patch.setattr(ReqToTokenPool, "__init__", mutant)


def padding_falls_on_the_last_row(patch: pytest.MonkeyPatch) -> None:
    """Rows counted from 0, so that padding becomes index -1."""
    stash = FutureMap.stash

    def mutant(self: FutureMap, rows: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        stash(self, torch.where(rows == 0, -1, rows), payload, scope)

    patch.setattr(FutureMap, "stash", mutant)


# ---- I3: the fence ----------------------------------------------------------------------------------------------


def lengths_read_without_waiting(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: FutureMap, batch: ScheduleBatch) -> None:
        batch.set_seq_lens(self.new_seq_lens_buf[batch.req_pool_indices])

    patch.setattr(FutureMap, "resolve_seq_lens", mutant)


def fence_covers_draft_extend(patch: pytest.MonkeyPatch) -> None:
    stash = FutureMap.stash

    def mutant(self: FutureMap, rows: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        stash(self, rows, payload, scope)
        self.publish_ready = self._forward_stream.record(scope)

    patch.setattr(FutureMap, "stash", mutant)


def only_the_device_twin_is_resolved(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ScheduleBatch, seq_lens: Tensor) -> None:
        self.seq_lens = seq_lens

    patch.setattr(ScheduleBatch, "set_seq_lens", mutant)


# ---- I6: inputs -------------------------------------------------------------------------------------------------


def inputs_taken_at_launch(patch: pytest.MonkeyPatch) -> None:
    forward = PlainWorker.forward

    def mutant(self: PlainWorker, batch: ForwardBatch, *, future_map: FutureMap, **rest: Any) -> WorkerOutput:
        early = future_map.resolve_forward_inputs(batch.req_pool_indices)
        taken = SimpleNamespace(resolve_forward_inputs=lambda _: early)
        return forward(self, batch, future_map=taken, **rest)  # type: ignore[arg-type]

    patch.setattr(PlainWorker, "forward", mutant)


def consumed_rows_not_poisoned(patch: pytest.MonkeyPatch) -> None:
    def forget(future_map: FutureMap) -> None:
        future_map._poisons_consumed_rows = False

    _after_making_the_relay(patch, forget)


def row_flag_dropped(patch: pytest.MonkeyPatch) -> None:
    results = StepInFlight.results

    def mutant(self: StepInFlight) -> list[RowResult]:
        return [dataclasses.replace(row, is_invalid=False) for row in results(self)]

    patch.setattr(StepInFlight, "results", mutant)


# ---- I7: bootstrap ----------------------------------------------------------------------------------------------


def bootstrap_rearms_publish_ready(patch: pytest.MonkeyPatch) -> None:
    bootstrap = FutureMap.bootstrap

    def mutant(self: FutureMap, prebuilt: ScheduleBatch, payload: RelayPayload) -> None:
        bootstrap(self, prebuilt, payload)
        self.publish_ready = self._forward_stream.record()

    patch.setattr(FutureMap, "bootstrap", mutant)


def _bootstrap_leaves(patch: pytest.MonkeyPatch, buffers_of: Callable[[FutureMap], Sequence[Tensor]]) -> None:
    bootstrap = FutureMap.bootstrap

    def mutant(self: FutureMap, prebuilt: ScheduleBatch, payload: RelayPayload) -> None:
        before = [buffer.clone() for buffer in buffers_of(self)]
        bootstrap(self, prebuilt, payload)
        for buffer, values in zip(buffers_of(self), before, strict=True):
            buffer.copy_(values)

    patch.setattr(FutureMap, "bootstrap", mutant)


def bootstrap_writes_no_lengths(patch: pytest.MonkeyPatch) -> None:
    _bootstrap_leaves(patch, lambda future_map: [future_map.new_seq_lens_buf])


def bootstrap_writes_no_tokens(patch: pytest.MonkeyPatch) -> None:
    _bootstrap_leaves(patch, lambda future_map: [future_map.output_tokens])


def bootstrap_writes_no_seeds(patch: pytest.MonkeyPatch) -> None:
    _bootstrap_leaves(patch, lambda future_map: list(future_map.seeds.values()))


def _ignores_the_schedule_side(patch: pytest.MonkeyPatch, stream_name: str) -> None:
    wait = ScriptedStream.wait

    def mutant(self: ScriptedStream, event: Event) -> None:
        if self.name != stream_name:
            wait(self, event)

    patch.setattr(ScriptedStream, "wait", mutant)


def forward_ignores_the_schedule_side(patch: pytest.MonkeyPatch) -> None:
    _ignores_the_schedule_side(patch, "forward")


def landing_ignores_the_schedule_side(patch: pytest.MonkeyPatch) -> None:
    _ignores_the_schedule_side(patch, "landing")


# ---- I8: empty batches ------------------------------------------------------------------------------------------


def empty_batch_publishes(patch: pytest.MonkeyPatch) -> None:
    publish = FutureMap.publish

    def mutant(self: FutureMap, rows: Tensor, new_seq_lens: Cell[Tensor], scope: Scope) -> None:
        publish(self, rows, new_seq_lens, scope)
        self.publish_ready = self._forward_stream.record(scope)

    patch.setattr(FutureMap, "publish", mutant)


def empty_batch_stashes(patch: pytest.MonkeyPatch) -> None:
    stash = FutureMap.stash

    def mutant(self: FutureMap, rows: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        if rows.shape[0]:
            stash(self, rows, payload, scope)
        else:
            self._forward_stream.enqueue(lambda: None, scope)

    patch.setattr(FutureMap, "stash", mutant)


def empty_batch_resolves(patch: pytest.MonkeyPatch) -> None:
    resolve = FutureMap.resolve_seq_lens

    def mutant(self: FutureMap, batch: ScheduleBatch) -> None:
        if self.publish_ready is not None:
            self.publish_ready.synchronize(1.0)
        resolve(self, batch)

    patch.setattr(FutureMap, "resolve_seq_lens", mutant)


# ---- I9, I10: quarantine and landing ----------------------------------------------------------------------------


def quarantine_skipped(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: KvPool, lease: RowLease) -> None:
        if not lease.is_held:
            return
        lease.state = LeaseState.FREE
        del self._held[lease.row]
        self._slots.give_back(lease.slots)
        self.rows.give_back(lease.row)

    patch.setattr(KvPool, "release", mutant)


def quarantine_ends_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowLease, "is_in_use", False)


def _use_not_noted(patch: pytest.MonkeyPatch, stream_name: str) -> None:
    use_until = RowLease.use_until

    def mutant(self: RowLease, event: Event) -> None:
        assert isinstance(event, ScriptedEvent)
        if event.stream.name != stream_name:
            use_until(self, event)

    patch.setattr(RowLease, "use_until", mutant)


def launch_does_not_hold_its_rows(patch: pytest.MonkeyPatch) -> None:
    _use_not_noted(patch, "forward")


def landing_does_not_hold_its_row(patch: pytest.MonkeyPatch) -> None:
    _use_not_noted(patch, "landing")


def row_merged_before_its_copies(patch: pytest.MonkeyPatch) -> None:
    poll = LandingZone.poll

    def mutant(self: LandingZone) -> object:
        for row in self._complete:
            row.copies.clear()
        return poll(self)

    patch.setattr(LandingZone, "poll", mutant)


def landing_into_a_released_row(patch: pytest.MonkeyPatch) -> None:
    """The landing zone keeps the row of a request that ended."""
    patch.setattr(LandingZone, "forget", lambda self, req: None)


def frames_matched_by_row_number_alone(patch: pytest.MonkeyPatch) -> None:
    """A frame finds a row of another call, such as an earlier attempt's."""

    def mutant(self: LandingZone, call_id: str, index: int) -> object:
        return next((call.rows[index] for call in self._calls.values() if index in call.rows), None)

    patch.setattr(LandingZone, "_row", mutant)


def grown_slot_leaks(patch: pytest.MonkeyPatch) -> None:
    release = KvPool.release

    def mutant(self: KvPool, lease: RowLease) -> None:
        if lease.state is LeaseState.RUNNING:
            lease.slots.pop()
        release(self, lease)

    patch.setattr(KvPool, "release", mutant)


def aborted_row_leaks(patch: pytest.MonkeyPatch) -> None:
    release = KvPool.release

    def mutant(self: KvPool, lease: RowLease) -> None:
        if lease.state is not LeaseState.TRANSFERRING:
            release(self, lease)

    patch.setattr(KvPool, "release", mutant)


# ---- I11: device names ------------------------------------------------------------------------------------------

CUDA_IN_THE_SCHEDULER = (
    "import torch.cuda",
    "torch.cuda.synchronize()",
    "from torch.cuda import Event",
    "from common.device.cuda import CudaEvent",
    "from common.device.cpu import CpuStream",
    "isinstance(event, CudaEvent)",
    "seq_lens.to('cuda:0')",
)
"""Lines that tie a scheduler to one device."""


# ---- I12: tokens ------------------------------------------------------------------------------------------------


def results_in_another_order(patch: pytest.MonkeyPatch) -> None:
    results = StepInFlight.results

    def mutant(self: StepInFlight) -> list[RowResult]:
        return results(self)[::-1]

    patch.setattr(StepInFlight, "results", mutant)


def failure_outlives_its_step(patch: pytest.MonkeyPatch) -> None:
    """Pieces belong to the stream instead of to their step."""
    enqueue = ScriptedStream.enqueue

    def mutant(self: ScriptedStream, work: Work, scope: Scope | None = None) -> None:
        enqueue(self, work)

    patch.setattr(ScriptedStream, "enqueue", mutant)


# ---- I13: noise -------------------------------------------------------------------------------------------------


def noise_keyed_by_place(patch: pytest.MonkeyPatch) -> None:
    def mutant(seeds: Tensor, choice_indices: Tensor, positions: Tensor) -> Tensor:
        return noise.row_keys(torch.arange(seeds.shape[0]), choice_indices, positions)

    patch.setattr(sampling, "row_keys", mutant)


def noise_keyed_by_step(patch: pytest.MonkeyPatch) -> None:
    steps = itertools.count()

    def mutant(seeds: Tensor, choice_indices: Tensor, positions: Tensor) -> Tensor:
        return noise.row_keys(seeds, choice_indices, torch.full_like(positions, next(steps)))

    patch.setattr(sampling, "row_keys", mutant)


def noise_without_seed(patch: pytest.MonkeyPatch) -> None:
    def mutant(seeds: Tensor, choice_indices: Tensor, positions: Tensor) -> Tensor:
        return noise.row_keys(torch.zeros_like(seeds), choice_indices, positions)

    patch.setattr(sampling, "row_keys", mutant)


def reused_row_not_reseeded(patch: pytest.MonkeyPatch) -> None:
    """A row's second request samples with its first one's parameters."""
    seen: set[int] = set()
    launch = DecodeEngine._launch

    def mutant(self: DecodeEngine, batch: ScheduleBatch) -> StepInFlight:
        self._unseeded = [req for req in self._unseeded if req.row_seed.row not in seen]
        seen.update(batch.req_pool_indices_cpu.tolist())
        return launch(self, batch)

    patch.setattr(DecodeEngine, "_launch", mutant)


# ---- I14: order and columns -------------------------------------------------------------------------------------


def merge_reorders(patch: pytest.MonkeyPatch) -> None:
    merge = ScheduleBatch.merge_batch

    def mutant(self: ScheduleBatch, other: ScheduleBatch) -> None:
        merge(other, self)
        self.__dict__.update(other.__dict__)

    patch.setattr(ScheduleBatch, "merge_batch", mutant)


def _forgets(patch: pytest.MonkeyPatch, operation: str, column: str) -> None:
    original = getattr(ScheduleBatch, operation)

    def mutant(self: ScheduleBatch, argument: object) -> None:
        before = getattr(self, column)
        original(self, argument)
        setattr(self, column, before)

    patch.setattr(ScheduleBatch, operation, mutant)


COLUMNS = ("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu")


def forgetful(operation: str, column: str) -> Mutant:
    """`filter_batch` or `merge_batch` leaves one column as it was."""

    def forgets_a_column(patch: pytest.MonkeyPatch) -> None:
        _forgets(patch, operation, column)

    forgets_a_column.__name__ = f"{operation}_forgets_{column}"
    return forgets_a_column


def filter_keeps_old_slots(patch: pytest.MonkeyPatch) -> None:
    _forgets(patch, "filter_batch", "out_cache_loc")


def filter_reorders(patch: pytest.MonkeyPatch) -> None:
    original = ScheduleBatch.filter_batch

    def mutant(self: ScheduleBatch, keep: Sequence[int]) -> None:
        original(self, keep[::-1])

    patch.setattr(ScheduleBatch, "filter_batch", mutant)


# ---- I15: what a stream holds -----------------------------------------------------------------------------------


def tensors_dropped_before_the_end(patch: pytest.MonkeyPatch) -> None:
    launch = DecodeEngine._launch

    def mutant(self: DecodeEngine, batch: ScheduleBatch) -> StepInFlight:
        step = launch(self, batch)
        gone = dict.fromkeys(("req_pool_indices", "seq_lens", "positions", "out_cache_loc"))
        return dataclasses.replace(step, batch=dataclasses.replace(step.batch, **gone))  # type: ignore[arg-type]

    patch.setattr(DecodeEngine, "_launch", mutant)


def tensors_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    kept = []
    snapshot = ForwardBatch.snapshot

    def mutant(batch: ScheduleBatch) -> ForwardBatch:
        kept.append(snapshot(batch))
        return kept[-1]

    patch.setattr(ForwardBatch, "snapshot", mutant)


def live_table_rewritten(patch: pytest.MonkeyPatch) -> None:
    """Growing a row also moves its first two tokens to each other's slots, in the lease and in the table."""
    grow = KvPool.grow_each

    def mutant(self: KvPool, leases: Sequence[RowLease]) -> list[int] | None:
        for lease in leases:
            lease.slots[:2] = lease.slots[:2][::-1]
            self.rows.write(lease.row, 0, lease.slots[:2])
        return grow(self, leases)

    patch.setattr(KvPool, "grow_each", mutant)
