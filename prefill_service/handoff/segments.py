"""Parts of prompts' KV, each as large as one segment, and the two ways to send them.

CopyingSender    sends bytes: copies them out of the pool, within a budget, for gRPC
LendingSender    lends KV: receivers get tickets, and read the KV in the pool's memory
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, from_numpy

from common.device.stream import Cell, Device, Event, Measured, OnEvent, Scope, StreamKind, raise_if_device_failed
from common.device.upload import across_devices
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import KvPool, RowLease
from common.kv.shared_kv import MAX_LENT_BYTES
from common.kv.shared_pool import SharedPool
from common.kv.slot_allocator import run_of
from common.prompts.chunk_batch import Chunk
from common.telemetry.timeline import FLOW
from common.wire.handoff import KvSegment, NewFramedKv, segment_flow
from prefill_service.prompt import Prompt


def first_sent(prompt: Prompt, pool: KvPool, group_name: str) -> int:
    """Returns the prompt's first position whose KV of a layer group is sent: the receiver lacks it, and will use it."""
    return max(prompt.row.num_held_of(group_name), pool.first_kept(group_name, prompt.num_tokens))


def sent_bytes(prompt: Prompt, pool: KvPool, group_name: str) -> int:
    """Returns how many bytes of a prompt's KV of a layer group are sent."""
    return pool.groups[group_name].token_bytes * (prompt.num_tokens - first_sent(prompt, pool, group_name))


def sent_tokens(chunk: Chunk[Prompt], first: int) -> range:
    """Returns the tokens whose KV is sent with a chunk: the chunk's, except those before position `first`.

    The tokens of a prompt's first chunk include those whose KV was in the prefix cache.
    """
    return range(max(0 if chunk.is_first else chunk.start, first), chunk.stop)


@dataclass(slots=True, eq=False)
class UnsentKv:
    """A part of one prompt's KV: a range of layers and tokens. The KV is in the pool when the event `written` is done.

    `forward` is the number of the forward that writes it, counted from 0. A queued part belongs to its sender, which
    may add layers to it.
    """

    prompt: Prompt
    lease: RowLease
    group: LayerGroupSpec
    layer_start: int
    num_layers: int
    token_start: int
    num_tokens: int
    written: Event
    forward: int

    @property
    def num_bytes(self) -> int:
        return self.group.layer_token_bytes * self.num_layers * self.num_tokens

    @property
    def tokens(self) -> slice:
        return slice(self.token_start, self.token_start + self.num_tokens)

    @property
    def layers(self) -> slice:
        return slice(self.layer_start, self.layer_start + self.num_layers)

    @property
    def segment(self) -> KvSegment:
        """The segment that carries the part, without the KV itself."""
        return KvSegment(
            row=self.prompt.index,
            layer_group=self.group.name,
            layer_start=self.layer_start,
            num_layers=self.num_layers,
            token_start=self.token_start,
            num_tokens=self.num_tokens,
        )

    def split(self, max_segment_bytes: int) -> list[UnsentKv]:
        """Splits the part into parts of at most `max_segment_bytes`, or of one token of one layer if that is more."""
        if self.num_bytes <= max_segment_bytes:
            return [self]
        num_layers, num_tokens = segment_shape(self.group, max_segment_bytes, layers=self.num_layers)
        token_stop, layer_stop = self.token_start + self.num_tokens, self.layer_start + self.num_layers
        return [
            replace(
                self,
                layer_start=layer,
                num_layers=min(num_layers, layer_stop - layer),
                token_start=token,
                num_tokens=min(num_tokens, token_stop - token),
            )
            for token in range(self.token_start, token_stop, num_tokens)
            for layer in range(self.layer_start, layer_stop, num_layers)
        ]


@dataclass(frozen=True, slots=True)
class SentKv:
    """A segment of a prompt that is ready to be sent, or the error with which its copy failed. One of them is None."""

    prompt: Prompt
    segment: KvSegment | None
    error: BaseException | None


class SegmentSender(ABC):
    """Turns parts of KV into segments. Only the engine thread calls it, and nothing here blocks."""

    def __init__(self, *, max_segment_bytes: int) -> None:
        self._max_segment_bytes = max_segment_bytes
        self._num_unsent: dict[Prompt, int] = {}

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether parts are on their way, so that `poll` may soon return their segments."""

    def num_unsent(self, prompt: Prompt) -> int:
        """Returns how many parts of the prompt still need the pool."""
        return self._num_unsent.get(prompt, 0)

    def queue(self, whole: UnsentKv) -> None:
        parts = whole.split(self._max_segment_bytes)
        self._num_unsent[whole.prompt] = self.num_unsent(whole.prompt) + len(parts)
        self._take(parts)

    def forget(self, prompt: Prompt) -> None:
        """Drops the parts of this prompt that are not sent."""
        self._num_unsent.pop(prompt, None)

    @abstractmethod
    def poll(self) -> Iterator[SentKv]:
        """Yields the segments that are ready, in order. For a segment whose copy failed it yields the error instead.

        KV that a failed forward did not write is left out: its prompts fail when that forward ends. Raises the error of
        a failed device or stream.
        """

    @abstractmethod
    def _take(self, parts: Sequence[UnsentKv]) -> None: ...

    def _is_wanted(self, part: UnsentKv) -> bool:
        """Returns whether to send the part: its prompt is not forgotten, and its KV was written.

        Call it only when the event `written` is done.
        """
        return part.prompt in self._num_unsent and part.written.error is None


def segment_shape(group: LayerGroupSpec, max_segment_bytes: int, *, layers: int) -> tuple[int, int]:
    """Returns how many layers and tokens the largest segment of a part with `layers` layers has.

    It has all layers of as many tokens as fit in `max_segment_bytes`. If not even one token fits, it has one token, and
    as many layers as fit, at least one.
    """
    num_tokens = max_segment_bytes // (group.layer_token_bytes * layers)
    if num_tokens:
        return layers, num_tokens
    return max(1, max_segment_bytes // group.layer_token_bytes), 1


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
        device's own host buffers. On a CPU the copying stream's thread calls `on_event` after each copy has ended, so
        that the engine polls.
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
        """Whether the call may take more of the budget: it has taken none, or the budget and its share are not
        exceeded.
        """
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


class LendingSender(SegmentSender):
    """Sends parts of KV by lending them. A part needs the pool until the receiver has given it back."""

    def __init__(self, pool: KvPool, memory: SharedPool) -> None:
        """Creates a sender that lends the KV of `pool`, which lies in `memory`."""
        super().__init__(max_segment_bytes=MAX_LENT_BYTES)
        self._pool = pool
        self._memory = memory
        self._queued: deque[UnsentKv] = deque()
        self._lent: dict[int, Prompt] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._queued)

    def poll(self) -> Iterator[SentKv]:
        for part in self._written():
            slots = self._pool.slots_of(part.lease, part.group.name, part.tokens)
            shared = self._memory.lend(part.group.name, part.layers, slots)
            self._lent[shared.ticket.number] = part.prompt
            yield SentKv(part.prompt, replace(part.segment, shared=shared), None)

    def return_segments(self, numbers: Sequence[int]) -> None:
        """Takes segments back that the receiver has finished reading. Segments of ended prompts are ignored."""
        for number in numbers:
            if (prompt := self._lent.pop(number, None)) is not None:
                self._num_unsent[prompt] -= 1

    def forget(self, prompt: Prompt) -> None:
        """Sends no more of this prompt, and forgets its lent segments.

        A receiver that still reads them notices when the slots are reused: a slot that a row gets has a new stamp, a
        number larger than the ticket's.
        """
        super().forget(prompt)
        self._lent = {number: borrower for number, borrower in self._lent.items() if borrower is not prompt}

    def _take(self, parts: Sequence[UnsentKv]) -> None:
        self._queued.extend(parts)

    def _written(self) -> list[UnsentKv]:
        """Takes the written parts out of the queue and returns those to lend.

        Adjacent layers of the same tokens are joined into one part.
        """
        parts: list[UnsentKv] = []
        last: dict[tuple[int, str, int], int] = {}
        while self._queued and self._queued[0].written.is_done():
            part = self._queued.popleft()
            raise_if_device_failed(part.written)
            if not self._is_wanted(part):
                continue
            tokens = (id(part.prompt), part.group.name, part.token_start)
            place = last.get(tokens)
            if place is not None and _are_one_loan(parts[place], part):
                parts[place].num_layers += part.num_layers
                self._num_unsent[part.prompt] -= 1
            else:
                last[tokens] = len(parts)
                parts.append(part)
        return parts


def _are_one_loan(first: UnsentKv, following: UnsentKv) -> bool:
    """Returns whether two parts of a row, whose first token is the same, can be lent as one segment.

    They must have the same tokens and adjacent layers, and together must not exceed MAX_LENT_BYTES.
    """
    return (
        following.num_tokens == first.num_tokens
        and following.layer_start == first.layers.stop
        and first.num_bytes + following.num_bytes <= MAX_LENT_BYTES
    )
