"""Receives handed-off rows: writes the KV of arriving frames to the pool and reports rows that are ready.

KvSegment ──▶ checked against the row ──▶ copied into its slots on the landing stream ──▶ bytes returned to the budget
landed = PrebuiltBatch entry + every token of every layer + the landing copies done
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from common.device.stream import Device, Event, Measured, OnEvent, Scope, StreamKind, raise_if_device_failed
from common.device.upload import across_devices
from common.draft.seed import TOPK_INDEX, TOPK_P
from common.errors import (
    BatonError,
    EngineFault,
    PrefillUnavailable,
    RowFailure,
    error_for_row_failure,
)
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import CopyKv, KvPool, RowLease
from common.kv.shared_kv import RemoteKv, SharedKv
from common.kv.slot_allocator import Slots, run_of
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.timeline import FLOW
from common.wire.handoff import Accepted, Frame, KvSegment, PrebuiltBatch, RowFailed, RowLogprobs, segment_flow
from decode_service.messages import SegmentsLanded
from decode_service.schedule.request import LostRow, Request
from decode_service.schedule.schedule_batch import ReadyRows


class SlotsReused(Exception):
    """Raised if the replica gave a lent segment's slots to another row before they had been read here.

    A replica may reuse the slots once the call has ended on its side.
    """


class FrameRejected(Exception):
    """Raised for a frame that no correct replica sends. The row that it names fails, and its call ends."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(f"row {row}: {message}")
        self.row = row


@dataclass(slots=True, eq=False)
class LandingRow:
    """A row whose KV is arriving, with what was received so far.

    `missing` maps each layer group to a [layers, tokens] mask of KV that has not come. `num_scored` counts the first
    tokens of the prompt whose log-probabilities have come in this attempt. The very first token, which has none, counts
    too.
    """

    req: Request
    replica: str
    lease: RowLease
    missing: dict[str, NDArray[np.bool_]]  # by layer group, shape [layers, tokens]
    received_bytes: dict[str, int]
    scope: Scope
    columns: PrebuiltBatch | None = None
    entry: int = 0
    num_waiting: int = 0  # number of segments whose copies have not been started
    last_copy: Event | None = None
    num_scored: int = 1

    @property
    def is_complete(self) -> bool:
        return self.columns is not None and not any(group.any() for group in self.missing.values())

    @property
    def has_landed(self) -> bool:
        """Whether all KV received so far is in the row's slots.

        Copies run in order, so it is enough to check the last one.
        """
        return not self.num_waiting and (self.last_copy is None or self.last_copy.is_done())

    def miscount(self) -> str | None:
        """Returns how the received bytes differ from those that the PrebuiltBatch reports as sent, or None if they
        agree.
        """
        assert self.columns is not None
        for name, received in self.received_bytes.items():
            sent = int(self.columns.bytes_sent[name][self.entry])
            if sent != received:
                return f"{name}: {sent} bytes were sent, {received} received"
        return None


@dataclass(frozen=True, slots=True)
class _Segment:
    """A received segment that fits its row, with the pool slots that it is copied to."""

    call_id: str
    row: LandingRow
    segment: KvSegment
    slots: Slots


@dataclass(slots=True, eq=False)
class _LandingCall:
    replica: str
    rows: dict[int, LandingRow]


@dataclass(frozen=True, slots=True)
class KvArrived:
    """News that KV of a request has come."""

    req: Request


@dataclass(frozen=True, slots=True)
class Scored:
    """News that log-probabilities of the request's prompt have come."""

    req: Request
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class AllComputed:
    """News that the replica has computed the request's whole prompt."""

    req: Request


@dataclass(frozen=True, slots=True)
class Landed:
    """The changes since the last poll: ready rows, lost rows, and segments that were copied or are not wanted."""

    ready: tuple[ReadyRows, ...]
    lost: tuple[LostRow, ...]
    freed: tuple[SegmentsLanded, ...]


class LandingZone:
    """Holds every Handoff call, and its rows until they have landed. Only the engine thread calls it; nothing blocks.

    Segments are copied in the order of arrival. On some devices (CUDA) the engine thread itself runs the copies' Python
    code, which takes up to a millisecond for a segment. There segments wait for `start_copies`, so that a launch waits
    for at most one of them.
    """

    def __init__(
        self,
        *,
        device: Device,
        pool: KvPool,
        vocab_size: int,
        copy_kv: CopyKv,
        on_event: OnEvent | None = None,
    ) -> None:
        """Creates an empty landing zone.

        `copy_kv` copies a segment's KV to its slots. On a CPU `on_event` is called by the landing stream's thread after
        each copy, so that the engine wakes and calls `poll`; it must not block.
        """
        self._device = device
        self._pool = pool
        self._vocab_size = vocab_size
        self._stream = device.new_stream("landing", StreamKind.COPY, on_event)
        self._copy_kv = copy_kv
        self._calls: dict[str, _LandingCall] = {}
        self._complete: dict[LandingRow, None] = {}
        self._waiting: deque[_Segment] = deque()
        self._copying: deque[tuple[str, KvSegment, Event]] = deque()
        self._freed: dict[str, list[KvSegment]] = {}

    @property
    def is_copying(self) -> bool:
        return bool(self._copying or self._complete)

    @property
    def has_waiting(self) -> bool:
        """Whether segments wait for `start_copies`."""
        return bool(self._waiting)

    @property
    def has_freed(self) -> bool:
        """Whether segments were freed since the last `poll`. A sender may be waiting for their bytes."""
        return bool(self._freed)

    @property
    def has_news(self) -> bool:
        """Whether `poll` has anything to check."""
        return bool(self._copying or self._complete or self._freed)

    def uncomputed_tokens(self) -> Counter[str]:
        """Returns for each replica how many tokens it was to compute for rows that have not landed yet."""
        tokens: Counter[str] = Counter()
        for call in self._calls.values():
            tokens[call.replica] += sum(row.req.num_uncomputed_tokens for row in call.rows.values())
        return tokens

    def open(self, call_id: str, replica: str, reqs: Sequence[Request]) -> None:
        rows: dict[int, LandingRow] = {}
        for index, req in enumerate(reqs):
            assert req.lease is not None
            rows[index] = LandingRow(
                req=req,
                replica=replica,
                lease=req.lease,
                missing={name: self._expected(req, group) for name, group in self._pool.groups.items()},
                received_bytes=dict.fromkeys(self._pool.groups, 0),
                scope=Scope(f"landing {req.request_id}"),
            )
        self._calls[call_id] = _LandingCall(replica, rows)

    def _expected(self, req: Request, group: LayerGroupSpec) -> NDArray[np.bool_]:
        """Returns a mask [layers, tokens] of the KV that is sent for a request."""
        first = max(req.num_unsent(group.name), self._pool.first_kept(group.name, len(req.token_ids)))
        return np.tile(np.arange(len(req.token_ids)) >= first, (group.num_layers, 1))

    def request_of(self, call_id: str, index: int) -> Request | None:
        row = self._row(call_id, index)
        return row.req if row else None

    def forget(self, req: Request) -> tuple[str, int] | None:
        """Forgets the request's row, so that KV that still arrives for it is dropped.

        Returns the call's id and the row's number in the call, so that the caller can cancel the row there. Returns
        None if no open call has the row.
        """
        for call_id, call in self._calls.items():
            for index, row in call.rows.items():
                if row.req is req:
                    del call.rows[index]
                    self._complete.pop(row, None)
                    return call_id, index
        for row in self._complete:
            if row.req is req:
                del self._complete[row]
                break
        return None

    def take_frame(self, call_id: str, frame: Frame) -> Sequence[KvArrived | Scored | AllComputed | LostRow]:
        """Applies one frame. Returns the news about its rows, except for rows that have left the call.

        Raises FrameRejected and applies nothing if the frame does not fit the row it names.
        """
        if isinstance(frame, KvSegment):
            return self._take_segment(call_id, frame)
        if isinstance(frame, RowLogprobs):
            return self._take_logprobs(call_id, frame)
        if isinstance(frame, PrebuiltBatch):
            return self._take_prebuilt(call_id, frame)
        if isinstance(frame, RowFailed):
            return self._take_failure(call_id, frame)
        assert isinstance(frame, Accepted)
        return ()

    def end_call(self, call_id: str, error: BatonError | None) -> list[LostRow]:
        """Ends a call. Returns the rows that are still incomplete: they are lost with `error`, and may be retried.

        None means that the replica ended the call without an error; incomplete rows then get PrefillUnavailable.
        """
        call = self._calls.pop(call_id, None)
        if call is None:
            return []
        cause = error or PrefillUnavailable("the replica ended the call before this row was complete")
        return [
            LostRow(row.req, cause, is_retryable=True, replica=call.replica)
            for row in call.rows.values()
            if not row.is_complete
        ]

    def poll(self) -> Landed:
        """Frees the segments whose copies the landing stream has finished. Returns the changes since the last poll.

        Raises the error with which the device or the stream failed, if it did.
        """
        while self._copying and self._copying[0][-1].is_done():  # copies end in the order of their stream
            call_id, segment, event = self._copying.popleft()
            raise_if_device_failed(event)
            self._free(call_id, segment)
        freed, self._freed = self._freed, {}
        landed = [row for row in self._complete if row.has_landed]
        lost = []
        ready: list[LandingRow] = []
        for row in landed:
            del self._complete[row]
            self._detach(row)
            error = row.scope.error or row.miscount()
            if error is None:
                ready.append(row)
            else:
                is_retryable = isinstance(error, SlotsReused)
                kind = PrefillUnavailable if is_retryable else EngineFault
                failure = kind(f"landing KV failed: {error}")
                lost.append(LostRow(row.req, failure, is_retryable, replica=row.replica))
        return Landed(tuple(_group(ready)), tuple(lost), tuple(map(_landed, freed, freed.values())))

    def close(self, timeout_s: float) -> None:
        self._stream.close(timeout_s)

    def _detach(self, row: LandingRow) -> None:
        for call in self._calls.values():
            for index, other in call.rows.items():
                if other is row:
                    del call.rows[index]
                    return

    def _row(self, call_id: str, index: int) -> LandingRow | None:
        call = self._calls.get(call_id)
        return call.rows.get(index) if call else None

    def _take_segment(self, call_id: str, segment: KvSegment) -> Sequence[KvArrived]:
        row = self._row(call_id, segment.row)
        if row is None:
            self._free(call_id, segment)
            return ()
        try:
            slots = self._claim(row, segment)
        except FrameRejected:
            self._free(call_id, segment)
            raise
        row.num_waiting += 1
        self._waiting.append(_Segment(call_id, row, segment, slots))
        self._note_if_complete(row)
        if self._device.runs_pieces_beside:
            self._start_copy()
        return (KvArrived(row.req),)

    def start_copies(self, until: Event | None) -> None:
        """Starts the copy of one waiting segment, and of more while the event `until` is not done.

        `until` is the end of the device's current work, during which the caller would only wait; None if there is no
        such work. Waiting segments that are no longer wanted are freed and do not count.
        """
        while self._waiting:
            if self._start_copy() and (until is None or until.is_done()):
                return

    def _start_copy(self) -> bool:
        """Takes the oldest waiting segment and starts its copy. Returns True.

        If the segment's row was given up, it frees the segment instead and returns False.
        """
        waiting = self._waiting.popleft()
        row, segment = waiting.row, waiting.segment
        row.num_waiting -= 1
        if not row.lease.is_held:  # the row was given up: its slots may belong to another request
            self._free(waiting.call_id, segment)
            return False

        def land() -> None:
            self._copy_in(segment, waiting.slots)

        self._stream.wait(self._device.schedule_stream.record())
        attempt = row.req.num_attempts - 1
        flow = segment_flow(row.req.request_id, attempt, segment.layer_group, segment.layer_start, segment.token_start)
        self._stream.enqueue(Measured(land, {"bytes": segment.num_bytes, FLOW: flow}), row.scope)
        event = self._stream.record(row.scope)
        row.last_copy = event
        row.lease.use_until(event, self._stream)
        self._copying.append((waiting.call_id, segment, event))
        return True

    def _free(self, call_id: str, segment: KvSegment) -> None:
        self._freed.setdefault(call_id, []).append(segment)

    def _claim(self, row: LandingRow, segment: KvSegment) -> Slots:
        """Marks the segment's tokens as received and returns their slots. Raises FrameRejected if the segment does not
        fit.
        """
        name = f"group {segment.layer_group!r}"
        missing = row.missing.get(segment.layer_group)
        if missing is None:
            raise FrameRejected(segment.row, f"{name}: there is no such layer group")
        layers = slice(segment.layer_start, segment.layer_start + segment.num_layers)
        tokens = slice(segment.token_start, segment.token_start + segment.num_tokens)
        if segment.num_layers < 1 or segment.num_tokens < 1:
            raise FrameRejected(segment.row, f"{name}: an empty segment")
        if layers.stop > missing.shape[0] or tokens.stop > missing.shape[1]:
            raise FrameRejected(segment.row, f"{name}: layers {layers} or tokens {tokens} are outside the row")
        if not missing[layers, tokens].all():
            raise FrameRejected(segment.row, f"{name}: layers {layers}, tokens {tokens} came twice")
        group = self._pool.groups[segment.layer_group]
        if segment.num_bytes != group.layer_token_bytes * segment.num_layers * segment.num_tokens:
            raise FrameRejected(segment.row, f"{name}: {segment.num_bytes} payload bytes do not fill the segment")
        missing[layers, tokens] = False
        row.received_bytes[segment.layer_group] += segment.num_bytes
        row.req.kv_bytes += segment.num_bytes
        return self._pool.slots_of(row.lease, segment.layer_group, tokens)

    def _copy_in(self, segment: KvSegment, slots: Slots) -> None:
        group = self._pool.groups[segment.layer_group]
        shards = self._pool.shards[segment.layer_group]
        values = _bytes_of(segment, group).view(shards[0].kv.dtype).unflatten(-1, (group.num_heads, group.head_dim))
        if self._device.torch_device != values.device:
            values = self._device.to_device(values)
        run = run_of(slots)
        places = None if run is not None else self._device.to_device(torch.tensor(slots))
        with across_devices([shard.kv for shard in shards]):
            for shard in shards:
                layers = shard.kv[segment.layer_start : segment.layer_start + segment.num_layers]
                own = values[..., shard.heads, :]
                if layers.device != own.device:
                    own = own.to(layers.device, non_blocking=True)
                if places is None:
                    self._copy_kv(layers[:, :, run], own)
                else:
                    layers.index_copy_(2, places.to(layers.device, non_blocking=True), own)
        if isinstance(segment.shared, SharedKv) and not segment.shared.is_current:
            raise SlotsReused("the replica used the slots again")

    def _take_logprobs(self, call_id: str, frame: RowLogprobs) -> Sequence[Scored]:
        row = self._row(call_id, frame.row)
        if row is None:
            return ()
        if row.columns is not None or frame.logprobs.start != row.num_scored:
            raise FrameRejected(frame.row, f"log-probabilities from {frame.logprobs.start} on, not {row.num_scored}")
        row.num_scored = frame.logprobs.stop
        return (Scored(row.req, frame.logprobs),)

    def _take_prebuilt(self, call_id: str, columns: PrebuiltBatch) -> Sequence[AllComputed]:
        rows = [(entry, index, self._row(call_id, index)) for entry, index in enumerate(columns.rows.tolist())]
        wanted = [(entry, index, row) for entry, index, row in rows if row is not None]
        checked = set[int]()
        for entry, index, row in wanted:
            if row.columns is not None or index in checked:
                raise FrameRejected(index, "a second PrebuiltBatch entry")
            self._check_entry(columns, entry, index, row)
            checked.add(index)
        for entry, _, row in wanted:
            row.columns = columns
            row.entry = entry
            row.req.found_cached(int(columns.num_cached_tokens[entry]))
            self._note_if_complete(row)
        return [AllComputed(row.req) for _, _, row in wanted]

    def _check_entry(self, columns: PrebuiltBatch, entry: int, index: int, row: LandingRow) -> None:
        if columns.seq_lens[entry] != len(row.req.token_ids):
            raise FrameRejected(index, f"seq_len {columns.seq_lens[entry]} is not {len(row.req.token_ids)}")
        if row.req.is_scored:
            raise FrameRejected(index, f"no log-probabilities of the prompt from {row.num_scored} on")
        if not 0 <= columns.first_token_ids[entry] < self._vocab_size:
            raise FrameRejected(index, f"first token {columns.first_token_ids[entry]} is not in the vocabulary")
        if (drafts := columns.seed_columns.get(TOPK_INDEX)) is not None:
            self._check_drafts(index, drafts[entry].tolist(), is_tree=TOPK_P in columns.seed_columns)
        if columns.bytes_sent.keys() != self._pool.groups.keys():
            raise FrameRejected(index, f"bytes_sent names {sorted(columns.bytes_sent)}")

    def _check_drafts(self, index: int, drafts: list[int], *, is_tree: bool) -> None:
        """Raises FrameRejected if a token in `drafts` is not in the vocabulary, or is there twice in a tree.

        `drafts` are the first drafts in the draft seed of row `index` of the call. A tree's first drafts are siblings,
        so no token may occur twice: it would be accepted twice.
        """
        if not all(0 <= draft < self._vocab_size for draft in drafts):
            raise FrameRejected(index, f"{TOPK_INDEX} {drafts} is not in the vocabulary")
        if is_tree and len(set(drafts)) < len(drafts):
            raise FrameRejected(index, f"{TOPK_INDEX} {drafts} names a token twice")

    def _take_failure(self, call_id: str, failed: RowFailed) -> Sequence[LostRow]:
        call = self._calls.get(call_id)
        row = call.rows.pop(failed.row, None) if call else None
        if call is None or row is None:
            return ()
        self._complete.pop(row, None)
        field = row.req.sampling.constraint_field
        error = error_for_row_failure(failed.reason, failed.message, constraint_field=field)
        is_refusal = failed.reason in (RowFailure.CAPACITY, RowFailure.DRAINING)
        return (
            LostRow(
                row.req,
                error,
                failed.retryable,
                replica=call.replica,
                retry_after_s=failed.retry_after_ms / 1000,
                is_refusal=is_refusal,
            ),
        )

    def _note_if_complete(self, row: LandingRow) -> None:
        if row.is_complete:
            self._complete[row] = None


def _bytes_of(segment: KvSegment, group: LayerGroupSpec) -> Tensor:
    """Returns the segment's KV on the host: [layers, planes, tokens, row_bytes] uint8. The planes are K and V."""
    if segment.shared is None:
        payload = from_dlpack(np.frombuffer(segment.payload, dtype=np.uint8))
        return payload.view(segment.num_layers, group.num_planes, segment.num_tokens, group.row_bytes)
    assert not isinstance(segment.shared, RemoteKv), "its transport fetches it"
    layers, slots = from_dlpack(segment.shared.layers), segment.shared.ticket.slots
    if (run := run_of(slots)) is not None:
        return layers[:, :, run]
    return layers.index_select(2, torch.tensor(slots))


def _landed(call_id: str, segments: Sequence[KvSegment]) -> SegmentsLanded:
    shared = tuple(segment.shared.ticket.number for segment in segments if segment.shared is not None)
    return SegmentsLanded(call_id, sum(segment.num_bytes for segment in segments), shared)


def _group(rows: Iterable[LandingRow]) -> list[ReadyRows]:
    """Groups rows by their PrebuiltBatch, so that each column becomes a tensor with one indexing operation."""
    by_batch: dict[int, list[LandingRow]] = {}
    for row in rows:
        by_batch.setdefault(id(row.columns), []).append(row)
    grouped = []
    for members in by_batch.values():
        columns = members[0].columns
        assert columns is not None
        entries = np.array([row.entry for row in members], dtype=np.int64)
        grouped.append(ReadyRows(columns, entries, tuple(row.req for row in members)))
    return grouped
