"""KV on its way out: layers of a chunk while later ones and the next chunk compute.

chunk launched ──▶ pieces queued ──budget──▶ copied to the host on the sending stream ──▶ KvSegment frames
                      │            ◀────────── SegmentBytesSent returns the budget ──────────┘
                      └── receiver can read the pool: lent as it lies there ──▶ KvSegment frames
                                   ◀────────── SegmentsReturned ends the loan ─┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, from_numpy

from common.device.cell import Cell
from common.device.stream import Device, Event, Measured, OnEvent, Scope, StreamKind, raise_if_device_failed
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import KvPool, RowLease
from common.kv.shared_kv import MAX_LENT_BYTES
from common.kv.shared_pool import SharedPool
from common.kv.slot_allocator import Slots
from common.kv.slot_run import run_of
from common.telemetry.timeline import FLOW
from common.wire.handoff import KvSegment, NewFramedKv, segment_flow
from prefill_service.forward.chunk_batch import Chunk
from prefill_service.prompt import Prompt


@dataclass(slots=True, eq=False)
class _Piece:
    """Part of one prompt's KV that fits one segment; its copy waits for `written`. `forward`: the number of its own.

    It is one queue's alone. Who takes it out may give it more layers.
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
    def slots(self) -> Slots:
        return self.lease.slots[self.token_start : self.token_start + self.num_tokens]

    @property
    def segment(self) -> KvSegment:
        """Without its KV."""
        return KvSegment(
            row=self.prompt.index,
            layer_group=self.group.name,
            layer_start=self.layer_start,
            num_layers=self.num_layers,
            token_start=self.token_start,
            num_tokens=self.num_tokens,
        )

    def may_take_in(self, following: _Piece) -> bool:
        """Whether that one, of the same tokens, is their next layers, and few enough for one loan."""
        return (
            following.num_tokens == self.num_tokens
            and following.layer_start == self.layer_start + self.num_layers
            and self.num_bytes + following.num_bytes <= MAX_LENT_BYTES
        )

    def split(self, max_segment_bytes: int) -> list[_Piece]:
        """The same KV in pieces of at most so many bytes, or a token of a layer."""
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
class _Copy:
    piece: _Piece
    scope: Scope
    segment: Cell[KvSegment]
    done: Event


@dataclass(frozen=True, slots=True)
class SentPiece:
    """A segment ready for the call's transport, or why its copy failed."""

    prompt: Prompt
    segment: KvSegment | None
    error: BaseException | None


class KvSender:
    """Only the engine thread calls it; nothing here blocks.

    Bytes copied out and not yet taken by a transport stay within `budget_bytes`, but for one segment of each call,
    which is always allowed: a receiver that stalls cannot keep the others from sending. While several calls have
    something to send, none takes more than a quarter of the budget. Of calls whose receiver can read `memory`, which
    the pool lies in, nothing is copied.
    """

    def __init__(
        self,
        *,
        device: Device,
        pool: KvPool,
        memory: SharedPool | None,
        budget_bytes: int,
        max_segment_bytes: int,
        new_framed_kv: NewFramedKv | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        """`new_framed_kv`: where KV of a pool on the host is gathered, if not into memory of the device's choice.
        `on_event`: of the stream that copies, whose events `poll` looks at.
        """
        self._device = device
        self._new_framed_kv = new_framed_kv
        self._pool = pool
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._max_segment_bytes = max_segment_bytes
        self._stream = device.new_stream("sending", StreamKind.COPY, on_event)
        self._queued: dict[str, deque[_Piece]] = {}
        self._num_forwards = 0
        self._num_ended = 0
        self._copying: deque[_Copy] = deque()
        self._num_pieces: dict[Prompt, int] = {}
        self._unsent: dict[str, int] = {}  # by call
        self._unsent_bytes = 0  # of all
        self._sharing: set[str] = set()
        self._lendable: deque[_Piece] = deque()
        self._lent: dict[int, Prompt] = {}

    @property
    def unsent_bytes(self) -> int:
        """Copied out of the pool, or being copied, and not yet taken by a transport."""
        return self._unsent_bytes

    @property
    def is_copying(self) -> bool:
        """Or waits for a forward to write what is to be lent."""
        return bool(self._copying or self._lendable)

    def num_pieces(self, prompt: Prompt) -> int:
        """Segments of the prompt that have not become frames yet, or are lent."""
        return self._num_pieces.get(prompt, 0)

    def layers_per_segment(self, group: LayerGroupSpec, num_tokens: int) -> int:
        """How many layers of `num_tokens` tokens fill one segment; 1 at least."""
        return max(1, self._max_segment_bytes // (group.layer_token_bytes * num_tokens))

    def queue(
        self,
        chunks: Sequence[Chunk],
        computed: Event,
        *,
        layers_written: Mapping[str, Sequence[tuple[range, Event]]],
    ) -> None:
        """Send a forward's KV, each layer group once `computed`, its end, is done; groups are in the order in which it
        writes them.

        Of the groups in `layers_written` each range of layers is sent once its own event is done: of all chunks before
        the next, or one chunk's last layers would keep the next one's first ones. None of those that `queue_layers` was
        told of are among them.
        """
        for name, group in self._pool.groups.items():
            for layers, written in layers_written.get(name, [(range(group.num_layers), computed)]):
                self.queue_layers(chunks, group, layers, written)
        self._num_forwards += 1

    def queue_layers(self, chunks: Sequence[Chunk], group: LayerGroupSpec, layers: range, written: Event) -> None:
        """Some of a forward's KV, while the forward that `queue` will be told of is still launched."""
        for chunk in chunks:
            self._queue_part(chunk, group, layers, written)

    def forward_ended(self) -> None:
        """The oldest of those queued that had not."""
        self._num_ended += 1

    def _queue_part(self, chunk: Chunk, group: LayerGroupSpec, layers: range, written: Event) -> None:
        prompt = chunk.prompt
        assert prompt.lease is not None
        is_sharing = prompt.call_id in self._sharing
        pieces = self._lendable if is_sharing else self._queued.setdefault(prompt.call_id, deque())
        whole = _Piece(
            prompt=prompt,
            lease=prompt.lease,
            group=group,
            layer_start=layers.start,
            num_layers=len(layers),
            token_start=chunk.start,
            num_tokens=chunk.num_tokens,
            written=written,
            forward=self._num_forwards,
        )
        parts = whole.split(MAX_LENT_BYTES if is_sharing else self._max_segment_bytes)
        pieces += parts
        self._num_pieces[prompt] = self._num_pieces.get(prompt, 0) + len(parts)

    def owes(self, call_id: str) -> bool:
        """Whether the call's transport holds bytes that it has not returned."""
        return call_id in self._unsent

    def return_budget(self, call_id: str, num_bytes: int) -> None:
        left = self._unsent.get(call_id, 0) - num_bytes
        assert left >= 0, f"call {call_id} returned {-left} bytes more than it was given"
        self._set_unsent(call_id, left)

    def forget(self, prompt: Prompt) -> None:
        """Send no more of this prompt. Copies under way end and are dropped."""
        pieces = self._queued.get(prompt.call_id)
        if pieces is not None:
            self._queued[prompt.call_id] = deque(piece for piece in pieces if piece.prompt is not prompt)
        self._num_pieces.pop(prompt, None)
        self._lent = {number: borrower for number, borrower in self._lent.items() if borrower is not prompt}

    def forget_call(self, call_id: str) -> None:
        """The call's transport is gone: what it had not taken is dropped, and its budget is free."""
        self._queued.pop(call_id, None)
        self._set_unsent(call_id, 0)
        self._sharing.discard(call_id)

    def open_call(self, call_id: str, *, shares_memory: bool) -> None:
        """`shares_memory`: the call's receiver can read the pool."""
        if shares_memory:
            assert self._memory is not None, "nobody can read it"
            self._sharing.add(call_id)

    def return_segments(self, numbers: Sequence[int]) -> None:
        """Nobody reads them any more. Of a prompt that has ended none is known."""
        for number in numbers:
            if (prompt := self._lent.pop(number, None)) is not None:
                self._num_pieces[prompt] -= 1

    def end_call(self, call_id: str) -> None:
        """Nothing more of the call will be queued."""
        self._sharing.discard(call_id)

    def start_copies(self) -> None:
        """Start as many copies as the budget allows, the calls taking turns. A call is not asked again once its next
        piece may not be copied.

        One stream copies, in order. So what a later forward is to write is not started yet: what is there already, or
        will be sooner, would wait for it.
        """
        turns = deque(self._queued)
        while turns:
            call_id = turns.popleft()
            pieces = self._queued[call_id]
            if not pieces:
                del self._queued[call_id]
            elif pieces[0].forward <= self._num_ended and self._may_copy(call_id, pieces[0].num_bytes):
                self._copy(pieces.popleft())
                turns.append(call_id)

    def poll(self) -> list[SentPiece]:
        """The segments whose copies have ended, and those that can be lent, each in order.

        Of what a failed forward did not write there is none: that forward's end fails its prompts. Raises what the
        device or a stream failed with.
        """
        return [*self._copied(), *self._lend()]

    def _copied(self) -> Iterator[SentPiece]:
        while self._copying and self._copying[0].done.is_done():
            copy = self._copying.popleft()
            raise_if_device_failed(copy.done)
            piece = copy.piece
            is_wanted = piece.prompt in self._num_pieces and piece.written.error is None
            if (not is_wanted or copy.scope.error is not None) and self.owes(piece.prompt.call_id):
                self.return_budget(piece.prompt.call_id, piece.num_bytes)
            if not is_wanted:
                continue
            self._num_pieces[piece.prompt] -= 1
            if copy.scope.error is not None:
                yield SentPiece(piece.prompt, None, copy.scope.error)
            else:
                yield SentPiece(piece.prompt, copy.segment.get(), None)

    def _lend(self) -> Iterator[SentPiece]:
        for piece in self._written():
            assert self._memory is not None
            layers = slice(piece.layer_start, piece.layer_start + piece.num_layers)
            shared = self._memory.lend(piece.group.name, layers, piece.slots, piece.lease.generation)
            self._lent[shared.ticket.number] = piece.prompt
            yield SentPiece(piece.prompt, replace(piece.segment, shared=shared), None)

    def _written(self) -> list[_Piece]:
        """What can be lent, the layers of the same tokens as one piece."""
        pieces: list[_Piece] = []
        last: dict[tuple[int, str, int], int] = {}
        while self._lendable and self._lendable[0].written.is_done():
            piece = self._lendable.popleft()
            raise_if_device_failed(piece.written)
            if piece.prompt not in self._num_pieces or piece.written.error is not None:
                continue
            tokens = (id(piece.prompt), piece.group.name, piece.token_start)
            place = last.get(tokens)
            if place is not None and pieces[place].may_take_in(piece):
                pieces[place].num_layers += piece.num_layers
                self._num_pieces[piece.prompt] -= 1
            else:
                last[tokens] = len(pieces)
                pieces.append(piece)
        return pieces

    def close(self, timeout_s: float) -> None:
        self._stream.close(timeout_s)

    def _may_copy(self, call_id: str, num_bytes: int) -> bool:
        mine = self._unsent.get(call_id, 0)
        if self._unsent_bytes + num_bytes > self._budget_bytes:
            return mine == 0
        share = self._budget_bytes if len(self._queued) == 1 else self._budget_bytes // 4
        return mine == 0 or mine + num_bytes <= share

    def _copy(self, piece: _Piece) -> None:
        scope = Scope(f"send {piece.prompt.row.request_id}")
        segment: Cell[KvSegment] = Cell()

        def copy_out() -> None:
            segment.set(self._copied_out(piece))

        self._set_unsent(piece.prompt.call_id, self._unsent.get(piece.prompt.call_id, 0) + piece.num_bytes)
        self._stream.wait(piece.written)
        row = piece.prompt.row
        flow = segment_flow(row.request_id, row.attempt, piece.group.name, piece.layer_start, piece.token_start)
        self._stream.enqueue(Measured(copy_out, {"bytes": piece.num_bytes, FLOW: flow}), scope)
        done = self._stream.record(scope)
        piece.lease.use_until(done, self._stream)
        self._copying.append(_Copy(piece, scope, segment, done))

    def _copied_out(self, piece: _Piece) -> KvSegment:
        """With the piece's KV; from another device that is there after what the stream does now."""
        if self._new_framed_kv is not None and self._device.torch_device.type == "cpu":
            write = partial(self._gather, piece)
            return replace(piece.segment, framed=self._new_framed_kv(piece.num_bytes, lambda to: write(from_numpy(to))))
        target = self._device.host_buffer((piece.num_bytes,), torch.uint8)
        self._gather(piece, target)
        return replace(piece.segment, payload=target.numpy())

    def _gather(self, piece: _Piece, into: Tensor) -> None:
        pool = self._pool.buffers[piece.group.name]
        layers = pool[piece.layer_start : piece.layer_start + piece.num_layers]
        values = into.view(pool.dtype).view(*layers.shape[:2], piece.num_tokens, *layers.shape[3:])
        if (run := run_of(piece.slots)) is not None:
            values.copy_(layers[:, :, run], non_blocking=True)
        elif layers.device.type == "cpu":
            torch.index_select(layers, 2, torch.tensor(piece.slots), out=values)
        else:
            slots = self._device.to_device(torch.tensor(piece.slots))
            values.copy_(layers.index_select(2, slots), non_blocking=True)

    def _set_unsent(self, call_id: str, num_bytes: int) -> None:
        self._unsent_bytes += num_bytes - self._unsent.pop(call_id, 0)
        if num_bytes:
            self._unsent[call_id] = num_bytes


def segment_shape(group: LayerGroupSpec, max_segment_bytes: int, *, layers: int) -> tuple[int, int]:
    """(layers, tokens) of the largest segment: all `layers` of as many tokens as fit, else one token of fewer."""
    num_tokens = max_segment_bytes // (group.layer_token_bytes * layers)
    if num_tokens:
        return layers, num_tokens
    return max(1, max_segment_bytes // group.layer_token_bytes), 1
