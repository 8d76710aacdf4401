"""A number of bytes that clients share."""

from __future__ import annotations

from collections import Counter


class NoRoom(Exception):
    """The client cannot have so many bytes now."""


class FairBytes:
    """Lends up to `max_bytes` to clients, which are identified by name. Call it from one thread only.

    One client may have half of them. A request for more than that counts as half.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()

    def take(self, client: str, num_bytes: int) -> int:
        """Takes bytes for `client`, and returns how many, to be passed to `give_back`. Raises NoRoom."""
        most = self._max_bytes // 2
        num_taken = min(num_bytes, most)
        if self._held[client] + num_taken > most or self._held.total() + num_taken > self._max_bytes:
            raise NoRoom
        self._held[client] += num_taken
        return num_taken

    def give_back(self, client: str, num_taken: int) -> None:
        self._held[client] -= num_taken
        if not self._held[client]:
            del self._held[client]
