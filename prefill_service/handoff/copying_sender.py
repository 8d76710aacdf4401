"""Sends KV as bytes: copies it out of the pool, within a budget, for gRPC."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, from_numpy

from common.device.stream import Cell, Device, Event, Measured, OnEvent, Scope, StreamKind, raise_if_device_failed
from common.device.upload import across_devices
from common.kv.pool import KvPool
from common.kv.slot_allocator import run_of
from common.telemetry.timeline import FLOW
from common.wire.handoff import KvSegment, NewFramedKv, segment_flow
from prefill_service.handoff.segments import SegmentSender, SentKv, UnsentKv
from prefill_service.prompt import Prompt


@dataclass(frozen=True, slots=True)
class _Copy:
    part: UnsentKv
    scope: Scope
    segment: Cell[KvSegment]
    done: Event


class CopyingSender(SegmentSender):
    """Copies parts of KV out of the pool and turns them into segments. A part needs the pool until its copy has
    ended.

    Bytes that are copied out, and that gRPC has not taken yet, stay within `budget_bytes`, except that each call may
    always have one segment. So a stalled receiver cannot keep the others from sending. While several calls have
    parts queued or bytes that gRPC has not taken, each takes at most a quarter of the budget.
    """

    def __init__(
        self,
        *,
        device: Device,
        pool: KvPool,
        budget_bytes: int,
        max_segment_bytes: int,
        new_framed_kv: NewFramedKv | None,
        on_event: OnEvent | None,
    ) -> None:
        """Creates a sender with a stream of its own for the copies.

        `new_framed_kv` allocates the memory into which KV is copied if the pool is in host memory; None means the
        device's own host buffers. On a CPU `on_event` is called by the copying stream's thread after each copy,
        whose end `poll` then sees.
        """
        super().__init__(max_segment_bytes=max_segment_bytes)
        self._device = device
        self._new_framed_kv = new_framed_kv
        self._pool = pool
        self._budget_bytes = budget_bytes
        self._stream = device.new_stream("sending", StreamKind.COPY, on_event)
        self._queued: dict[str, deque[UnsentKv]] = {}
        self._copying: deque[_Copy] = deque()
        self._unsent: dict[str, int] = {}  # by call
        self._unsent_bytes = 0  # sum over all calls

    @property
    def is_busy(self) -> bool:
        return bool(self._copying)

    @property
    def unsent_bytes(self) -> int:
        """The bytes that count against the budget: no transport has taken them yet."""
        return self._unsent_bytes

    def start(self, num_forwards: int) -> None:
        """Starts as many copies as the budget allows. Calls take turns, one part each.

        `num_forwards` is the number of forwards that have ended. Their parts are copied, and those of the forward that
        ends next. Parts of later forwards must wait, because one stream makes all copies in order: KV that is ready
        sooner would be copied only after them.
        """
        turns = deque(self._queued)
        while turns:
            call_id = turns.popleft()
            parts = self._queued[call_id]
            if not parts:
                del self._queued[call_id]
            elif parts[0].forward <= num_forwards and self._may_take(call_id, parts[0].num_bytes):
                self._copy(parts.popleft())
                turns.append(call_id)

    def poll(self) -> Iterator[SentKv]:
        while self._copying and self._copying[0].done.is_done():
            copy = self._copying.popleft()
            raise_if_device_failed(copy.done)
            part, error = copy.part, copy.scope.error
            is_wanted = self._is_wanted(part)
            if (not is_wanted or error is not None) and self.owes(part.prompt.call_id):
                self.return_budget(part.prompt.call_id, part.num_bytes)
            if is_wanted:
                self._num_unsent[part.prompt] -= 1
                yield SentKv(part.prompt, copy.segment.get() if error is None else None, error)

    def owes(self, call_id: str) -> bool:
        """Returns whether some of the call's bytes still count against the budget."""
        return call_id in self._unsent

    def has_room(self, call_id: str) -> bool:
        """Whether the call may take more of the budget: the budget and the call's share are not used up."""
        return self._may_take(call_id, 0)

    def take_budget(self, call_id: str, num_bytes: int) -> None:
        self._set_unsent(call_id, self._unsent.get(call_id, 0) + num_bytes)

    def return_budget(self, call_id: str, num_bytes: int) -> None:
        left = self._unsent.get(call_id, 0) - num_bytes
        assert left >= 0, f"call {call_id} returned {-left} bytes more than it was given"
        self._set_unsent(call_id, left)

    def forget(self, prompt: Prompt) -> None:
        """Sends no more of this prompt. Copies that have started run to their end; their segments are dropped."""
        super().forget(prompt)
        parts = self._queued.get(prompt.call_id)
        if parts is not None:
            self._queued[prompt.call_id] = deque(part for part in parts if part.prompt is not prompt)

    def forget_call(self, call_id: str) -> None:
        """Drops the call's queued parts and frees its budget, because its gRPC stream is gone."""
        self._queued.pop(call_id, None)
        self._set_unsent(call_id, 0)

    def close(self, timeout_s: float) -> None:
        self._stream.close(timeout_s)

    def _take(self, parts: Sequence[UnsentKv]) -> None:
        self._queued.setdefault(parts[0].prompt.call_id, deque()).extend(parts)

    def _may_take(self, call_id: str, num_bytes: int) -> bool:
        mine = self._unsent.get(call_id, 0)
        if self._unsent_bytes + num_bytes > self._budget_bytes:
            return mine == 0
        is_alone = (self._queued.keys() | self._unsent.keys()) <= {call_id}
        share = self._budget_bytes if is_alone else self._budget_bytes // 4
        return mine == 0 or mine + num_bytes <= share

    def _copy(self, part: UnsentKv) -> None:
        scope = Scope(f"send {part.prompt.row.request_id}")
        segment: Cell[KvSegment] = Cell()

        def copy_out() -> None:
            segment.set(self._copied_out(part))

        self.take_budget(part.prompt.call_id, part.num_bytes)
        self._stream.wait(part.written)
        row = part.prompt.row
        flow = segment_flow(row.request_id, row.attempt, part.group.name, part.layer_start, part.token_start)
        self._stream.enqueue(Measured(copy_out, {"bytes": part.num_bytes, FLOW: flow}), scope)
        done = self._stream.record(scope)
        part.lease.use_until(done, self._stream)
        self._copying.append(_Copy(part, scope, segment, done))

    def _copied_out(self, part: UnsentKv) -> KvSegment:
        """Copies the part's KV out of the pool and returns it as a segment. Runs on the copying stream.

        If the pool is on a GPU, the copy has ended only when the stream's work so far is done.
        """
        if self._new_framed_kv is not None and self._device.torch_device.type == "cpu":
            framed = self._new_framed_kv(part.num_bytes, lambda array: self._gather(part, from_numpy(array)))
            return replace(part.segment, framed=framed)
        target = self._device.host_buffer((part.num_bytes,), torch.uint8)
        self._gather(part, target)
        return replace(part.segment, payload=target.numpy())

    def _gather(self, part: UnsentKv, into: Tensor) -> None:
        group, shards = part.group, self._pool.shards[part.group.name]
        values = into.view(shards[0].kv.dtype).view(
            part.num_layers, group.num_planes, part.num_tokens, group.num_heads, group.head_dim
        )
        slots = self._pool.slots_of(part.lease, part.group.name, part.tokens)
        run = run_of(slots)
        places = None if run is not None else self._device.to_device(torch.from_numpy(slots))
        torch_device = self._device.torch_device
        here = values if torch_device.type == "cpu" else torch.empty_like(values, device=torch_device)
        with across_devices([shard.kv for shard in shards]):
            for shard in shards:
                layers, own = shard.kv[part.layers], here[..., shard.heads, :]
                if places is None:
                    own.copy_(layers[:, :, run], non_blocking=True)
                elif own.is_contiguous() and own.device == layers.device:
                    torch.index_select(layers, 2, places, out=own)
                else:
                    found = layers.index_select(2, places.to(layers.device, non_blocking=True))
                    own.copy_(found, non_blocking=True)
        if here is not values:
            values.copy_(here, non_blocking=True)

    def _set_unsent(self, call_id: str, num_bytes: int) -> None:
        self._unsent_bytes += num_bytes - self._unsent.pop(call_id, 0)
        if num_bytes:
            self._unsent[call_id] = num_bytes
