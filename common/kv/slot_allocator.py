"""The token slots of the KV pool that nobody holds."""

from __future__ import annotations

PADDING_SLOT = 0


class SlotAllocator:
    """Hands out slot numbers 1..num_slots. Slot 0 is padding: writes to it are harmless and it is never given out."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, PADDING_SLOT, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(self._free)

    def take(self, num_slots: int) -> list[int] | None:
        """`num_slots` distinct slots, all or none."""
        if num_slots > len(self._free):
            return None
        if num_slots == 0:
            return []
        taken = self._free[-num_slots:]
        del self._free[-num_slots:]
        taken.reverse()
        return taken

    def give_back(self, slots: list[int]) -> None:
        """Slots given back together are handed out together again, in the same order."""
        self._free.extend(reversed(slots))
