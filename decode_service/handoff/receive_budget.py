"""A bound on the bytes of received segments that are not yet copied into the engine's pool, for all Handoff calls."""

from __future__ import annotations

import asyncio


class ReceiveBudget:
    """Grants bytes to Handoff calls in the order in which they asked. Not thread-safe.

    While no bytes are granted, a call in line may take more than the limit, so that any segment can pass.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: dict[str, asyncio.Event] = {}  # set when it is the call's turn; in the order they asked

    @property
    def next_waiting(self) -> str | None:
        """The call whose turn it is, or None if no call waits."""
        return next(iter(self._waiting), None)

    def take_at_once(self, num_bytes: int) -> bool:
        """Takes the bytes if no call waits and they fit in the limit. Returns whether it took them.

        It never exceeds the limit, and puts no call in the line.
        """
        if self._waiting or self._held_bytes + num_bytes > self._limit_bytes:
            return False
        self._held_bytes += num_bytes
        return True

    async def take(self, call_id: str, num_bytes: int) -> None:
        """Waits until the budget has room, and takes the bytes for the call. Only one task per call may wait."""
        try:
            while not self.try_take(call_id, num_bytes):
                turn = self._waiting[call_id]
                turn.clear()
                await turn.wait()
        finally:
            self.forget(call_id)

    def try_take(self, call_id: str, num_bytes: int) -> bool:
        """Takes the bytes for the call and returns True, or puts the call at the end of the line and returns False.

        A call in line keeps its place. It must ask again when it is `next_waiting` and bytes came back.
        """
        self._waiting.setdefault(call_id, asyncio.Event())
        fits = not self._held_bytes or self._held_bytes + num_bytes <= self._limit_bytes
        if not fits or self.next_waiting != call_id:
            return False
        del self._waiting[call_id]
        self._held_bytes += num_bytes
        return True

    def forget(self, call_id: str) -> None:
        """Removes the call from the line. Bytes that it was granted stay held until they have landed."""
        self._waiting.pop(call_id, None)
        self._wake_next()

    def give_back(self, num_bytes: int) -> None:
        assert num_bytes <= self._held_bytes, "more bytes landed than were handed over"
        self._held_bytes -= num_bytes
        self._wake_next()

    def _wake_next(self) -> None:
        if (call_id := self.next_waiting) is not None:
            self._waiting[call_id].set()
