"""Sends KV to the decode services. A chunk's first layers leave while its later layers and the next chunk compute.

chunk launched ──▶ parts queued ──budget──▶ copied to the host on the sending stream ──▶ KvSegment frames
                      │            ◀────────── BytesSent returns the budget ─────────────────┘
                      └── receiver can read the pool: lent as it lies there ──▶ KvSegment frames
                                   ◀────────── SegmentsReturned ends the loan ─┘
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.device.stream import Device, Event, OnEvent
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import KvPool
from common.kv.shared_pool import SharedPool
from common.prompts.chunk_batch import Chunk
from common.wire.handoff import NewFramedKv
from prefill_service.handoff.segments import (
    CopyingSender,
    LendingSender,
    SegmentSender,
    SentKv,
    UnsentKv,
    first_sent,
    sent_tokens,
)
from prefill_service.messages import BytesSent, SegmentsReturned
from prefill_service.prompt import Prompt


class KvSender:
    """Sends the KV of prompts as copies, or as loans if the call's receiver can read the pool's `memory`. A loan copies
    nothing. A part is KV of one prompt that goes into one segment. Only the engine thread calls this class, and nothing
    here blocks.

    Copies take a CopyingSender's budget. Log-probabilities of prompts take it too, also in calls whose KV is lent.
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
        """Creates a sender that lends KV if `memory`, the pool's shared memory, is not None.

        The other arguments are those of a CopyingSender.
        """
        self._pool = pool
        self._max_segment_bytes = max_segment_bytes
        self._copying = CopyingSender(
            device=device,
            pool=pool,
            budget_bytes=budget_bytes,
            max_segment_bytes=max_segment_bytes,
            new_framed_kv=new_framed_kv,
            on_event=on_event,
        )
        self._lending = None if memory is None else LendingSender(pool, memory)
        self._of_call: dict[str, SegmentSender] = {}
        self._num_forwards = 0
        self._num_ended = 0

    @property
    def unsent_bytes(self) -> int:
        """The bytes of KV copied out of the pool, or being copied, and of log-probabilities, that no transport has
        taken.
        """
        return self._copying.unsent_bytes

    @property
    def is_busy(self) -> bool:
        """Whether parts are being copied or wait to be lent, so that `poll` may soon return segments."""
        return self._copying.is_busy or (self._lending is not None and self._lending.is_busy)

    def layers_per_segment(self, group: LayerGroupSpec, num_tokens: int) -> int:
        """Returns how many layers of `num_tokens` tokens fill one segment, at least 1."""
        return max(1, self._max_segment_bytes // (group.layer_token_bytes * num_tokens))

    # ---- calls and prompts ----------------------------------------------------------------------------------------

    def open_call(self, call_id: str, *, shares_memory: bool) -> None:
        """Registers a Handoff call. `shares_memory` means that the call's receiver can read the pool."""
        sender = self._lending if shares_memory else self._copying
        assert sender is not None, "nobody can read the pool"
        self._of_call[call_id] = sender

    def num_unsent(self, prompt: Prompt) -> int:
        """Returns how many parts of the prompt still need the pool: those not copied out yet, and those lent."""
        return self._of_call[prompt.call_id].num_unsent(prompt)

    def forget(self, prompt: Prompt) -> None:
        """Sends no more of this prompt, and forgets the segments lent for it. Its call must be open.

        Copies that have started run to their end; their segments are dropped.
        """
        self._of_call[prompt.call_id].forget(prompt)

    def end_call(self, call_id: str) -> None:
        """Notes that nothing more will be queued for the call. Bytes copied out for it take budget until they are given
        back.
        """
        del self._of_call[call_id]

    def forget_call(self, call_id: str) -> None:
        """Drops the call's queued parts and frees its budget, because its gRPC stream is gone.

        It may also be called after `end_call`.
        """
        self._of_call.pop(call_id, None)
        self._copying.forget_call(call_id)

    def may_add_logprobs(self, call_id: str) -> bool:
        """Whether the budget has room for log-probabilities of the call's prompts.

        Log-probabilities of forwards in flight are not counted yet, so they may exceed the budget.
        """
        return self._copying.has_room(call_id)

    def add_logprobs(self, call_id: str, num_bytes: int) -> None:
        """Counts log-probabilities that the transport gets: they take budget until `give_back`."""
        self._copying.take_budget(call_id, num_bytes)

    def give_back(self, returned: BytesSent | SegmentsReturned) -> None:
        """Frees the budget of bytes that a transport took, or ends the loan of segments that a receiver has read.

        Bytes of a call that is gone are ignored.
        """
        match returned:
            case BytesSent(call_id, num_bytes):
                if call_id in self._of_call or self._copying.owes(call_id):
                    self._copying.return_budget(call_id, num_bytes)
            case SegmentsReturned(numbers=numbers):
                if self._lending is not None:
                    self._lending.return_segments(numbers)

    # ---- forwards -------------------------------------------------------------------------------------------------

    def queue(self, chunks: Sequence[Chunk[Prompt]], computed: Event, *, queued: Collection[str]) -> None:
        """Queues the rest of the KV of a forward's chunks, to be sent after the event `computed`, the forward's end.

        `queued` names the layer groups whose layers were all given to `queue_layers`. Call it once for each forward, in
        order.
        """
        for name, group in self._pool.groups.items():
            if name not in queued:
                self.queue_layers(chunks, group, range(group.num_layers), computed)
        self._num_forwards += 1

    def queue_layers(
        self, chunks: Sequence[Chunk[Prompt]], group: LayerGroupSpec, layers: range, written: Event
    ) -> None:
        """Queues a range of a group's layers of a forward's chunks, to be sent after the event `written`.

        It may be called while the forward is still being launched. `queue`, called after the launch, queues the other
        groups. Each call queues its range for all chunks, so that one chunk's last layers do not delay another's first
        ones.
        """
        for chunk in chunks:
            first = first_sent(chunk.prompt, self._pool, group.name)
            if not (layers and (tokens := sent_tokens(chunk, first))):
                continue
            prompt = chunk.prompt
            assert prompt.lease is not None
            whole = UnsentKv(
                prompt=prompt,
                lease=prompt.lease,
                group=group,
                layer_start=layers.start,
                num_layers=len(layers),
                token_start=tokens.start,
                num_tokens=len(tokens),
                written=written,
                forward=self._num_forwards,
            )
            self._of_call[prompt.call_id].queue(whole)

    def forward_ended(self) -> None:
        """Counts one more ended forward. Forwards end in the order in which they were queued."""
        self._num_ended += 1

    def start_copies(self) -> None:
        """Starts as many copies as the budget allows. Calls take turns, one part each.

        Parts of forwards that have ended are copied, and those of the forward that ends next. Parts of later forwards
        must wait, because one stream makes all copies in order: KV that is ready sooner would be copied only after
        them.
        """
        self._copying.start(self._num_ended)

    def poll(self) -> list[SentKv]:
        """Returns segments whose copies have ended, and those that can be lent, each in order.

        KV that a failed forward did not write is left out: its prompts fail when that forward ends. Raises the error of
        a failed device or stream.
        """
        return [*self._copying.poll(), *(self._lending.poll() if self._lending is not None else ())]

    def close(self, timeout_s: float) -> None:
        self._copying.close(timeout_s)
