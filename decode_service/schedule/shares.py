"""How many tokens each client was served, by which clients share the service where they have weights."""

from __future__ import annotations

from collections.abc import Mapping

OTHERS = "*"
"""Stands for all clients without a weight of their own."""
_MAX_IDLE = 1024


class Shares:
    """Counts the tokens of each client, divided by its weight. Only the engine thread calls it.

    Of the clients that wait, the one with the smallest count has the next turn. So clients that always have requests
    waiting are served tokens in proportion to their weights. A client that begins to wait gets at least the count of a
    client that had always waited: it has saved nothing up while it did not ask. That count grows with every token that
    anyone is served. So clients that come for the first time, however many, do not pass one that waits for ever.

    `weights` has the weight of each client, and that of all others as OTHERS, or 1. The counts of at most 1024 clients
    that do not wait are kept, the largest ones.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._counts: dict[str, float] = {}
        self._waiting: dict[str, None] = {}
        self._waiting_weight = 0.0
        self._floor = 0.0

    @property
    def num_counts(self) -> int:
        return len(self._counts)

    def count(self, client: str) -> float:
        return self._counts.get(client, self._floor)

    def begin_to_wait(self, client: str) -> None:
        self._counts[client] = max(self.count(client), self._floor)
        self._waiting[client] = None
        self._waiting_weight += self._weight(client)

    def end_to_wait(self, client: str) -> None:
        del self._waiting[client]
        self._waiting_weight = self._waiting_weight - self._weight(client) if self._waiting else 0.0
        self._forget_one()

    def charge(self, client: str, num_tokens: int) -> None:
        """Notes that a client was served tokens: the prompt of a request that gets its row, or output."""
        weight = self._weight(client)
        self._counts[client] = self.count(client) + num_tokens / weight
        self._floor += num_tokens / (self._waiting_weight + (0.0 if client in self._waiting else weight))
        self._forget_one()

    def _weight(self, client: str) -> float:
        return self._weights.get(client, self._weights.get(OTHERS, 1.0))

    def _forget_one(self) -> None:
        if len(self._counts) - len(self._waiting) > _MAX_IDLE:
            del self._counts[min(self._counts.keys() - self._waiting.keys(), key=self.count)]
