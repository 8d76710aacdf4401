"""Where the sender copies a segment to: shared memory that its receiver maps too, or plain host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from common.device.stream import Device
from common.wire.kv_ring import KvRing, RingSlot

_NUM_SLOTS = 4  # one is written, one is read, two are on their way


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where one segment goes: `slot`, or host memory that is still to be allocated."""

    num_bytes: int
    slot: RingSlot | None = None

    def memory(self, device: Device) -> Tensor:
        """[num_bytes] uint8 on the host. To be called once, where a failure is the segment's own."""
        if self.slot is not None:
            return from_dlpack(self.slot.payload)
        return device.host_buffer((self.num_bytes,), torch.uint8)


class SegmentMemory:
    """Only the engine thread calls it.

    A slot is its call's from `take` until `give_back`, or until `forget_call`; while it is being written, until
    `written` at the earliest. A call that finds the ring full waits for its own slots; one that has none there gets
    host memory, so that receivers that give nothing back cannot hold up the others.
    """

    def __init__(self, ring: KvRing | None) -> None:
        self._ring = ring
        self._sharing: set[str] = set()
        self._lent: dict[int, tuple[str, RingSlot]] = {}
        self._writing: set[int] = set()
        self._forgotten: set[int] = set()  # to be freed once they are written

    def share(self, call_id: str) -> None:
        """The call's receiver has mapped the ring."""
        self._sharing.add(call_id)

    def max_segment_bytes(self, call_id: str) -> int:
        """Of segments of this call that go through the ring, of which four fit; 0 when none do."""
        return self._ring.num_bytes // _NUM_SLOTS if self._ring is not None and call_id in self._sharing else 0

    def take(self, call_id: str, num_bytes: int) -> SegmentPlace | None:
        """A place for a segment; None when the call must wait until it gets slots back."""
        if self._ring is not None and call_id in self._sharing:
            slot = self._ring.take(num_bytes)
            if slot is not None:
                self._lent[slot.ticket.generation] = (call_id, slot)
                self._writing.add(slot.ticket.generation)
                return SegmentPlace(num_bytes, slot)
            if any(holder == call_id for holder, _ in self._lent.values()):
                return None
        return SegmentPlace(num_bytes)

    def written(self, place: SegmentPlace) -> None:
        """No stream writes there any more."""
        if place.slot is not None:
            generation = place.slot.ticket.generation
            self._writing.discard(generation)
            if generation in self._forgotten:
                self._forgotten.discard(generation)
                self._free(generation)

    def give_back(self, generation: int) -> None:
        """Nobody reads the slot any more. One that the call's end has freed is ignored."""
        if generation in self._lent:
            self._free(generation)

    def end_call(self, call_id: str) -> None:
        """The call takes no more; its slots come back one by one."""
        self._sharing.discard(call_id)

    def forget_call(self, call_id: str) -> None:
        """The call's stream is gone. A receiver that still reads sees by the stamps what was put there since."""
        self._sharing.discard(call_id)
        for generation in [generation for generation, (holder, _) in self._lent.items() if holder == call_id]:
            if generation in self._writing:
                self._forgotten.add(generation)
            else:
                self._free(generation)

    def _free(self, generation: int) -> None:
        assert self._ring is not None
        _, slot = self._lent.pop(generation)
        self._ring.give_back(slot)
