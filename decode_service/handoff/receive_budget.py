"""The bound on segments that were handed to the engine and have not landed."""

from __future__ import annotations

import asyncio


class ReceiveBudget:
    """Grants bytes to calls in the order they asked; one grant is always allowed, however large. Not thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: dict[str, None] = {}  # in order

    @property
    def next_waiting(self) -> str | None:
        """The call to be granted next."""
        return next(iter(self._waiting), None)

    def take_at_once(self, num_bytes: int) -> bool:
        """Whether the caller has the bytes now: nobody waits, and they keep within the limit."""
        if self._waiting or self._held_bytes + num_bytes > self._limit_bytes:
            return False
        self._held_bytes += num_bytes
        return True

    def try_take(self, call_id: str, num_bytes: int) -> bool:
        """Whether the call has the bytes now. If not, it waits in line and asks again at its turn."""
        self._waiting.setdefault(call_id)
        fits = not self._held_bytes or self._held_bytes + num_bytes <= self._limit_bytes
        if not fits or self.next_waiting != call_id:
            return False
        del self._waiting[call_id]
        self._held_bytes += num_bytes
        return True

    def forget(self, call_id: str) -> None:
        """The call waits no more. Bytes granted before stay held until they have landed."""
        self._waiting.pop(call_id, None)

    def give_back(self, num_bytes: int) -> None:
        assert num_bytes <= self._held_bytes, "more bytes landed than were handed over"
        self._held_bytes -= num_bytes


class AsyncReceiveBudget:
    """A ReceiveBudget that can be awaited. Event loop only."""

    def __init__(self, limit_bytes: int) -> None:
        self._budget = ReceiveBudget(limit_bytes)
        self._turns: dict[str, asyncio.Event] = {}

    def take_at_once(self, num_bytes: int) -> bool:
        return self._budget.take_at_once(num_bytes)

    async def take(self, call_id: str, num_bytes: int) -> None:
        """Return once the call has the bytes. One task for each call."""
        turn = self._turns[call_id] = asyncio.Event()
        try:
            while not self._budget.try_take(call_id, num_bytes):
                turn.clear()
                await turn.wait()
        finally:
            del self._turns[call_id]
            self._budget.forget(call_id)
            self._wake_next()

    def give_back(self, num_bytes: int) -> None:
        self._budget.give_back(num_bytes)
        self._wake_next()

    def _wake_next(self) -> None:
        if (call_id := self._budget.next_waiting) is not None:
            self._turns[call_id].set()
