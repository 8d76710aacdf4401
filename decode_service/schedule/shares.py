"""What clients hold of the decode service's pool, what they have held, and so whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from decode_service.schedule.request import Request

OTHERS = "*"
"""Stands for all clients without a weight of their own."""
HORIZON_S = 10.0
"""For how long a client is expected to keep what it holds. What one held long ago counts for as little as that."""
_MAX_IDLE = 1024


class Shares:
    """Says which client is served first, and which gives way. Only the engine thread calls it.

    A client's part is what it holds of the pool's rows or of its slots, whichever is more, divided by its weight. While
    requests wait, each client is charged its part for every second. The client with the smallest standing, which is its
    charge and HORIZON_S times its part, has the next turn, and the one with the largest gives way. So clients that
    always have requests waiting hold parts in proportion to their weights, and over time also where parts are coarse.

    A client that begins to wait gets at least the charge of one that had always held what is its by its weight: it has
    saved nothing up while it did not ask. That charge grows with all that anyone is charged, so clients that come for
    the first time, however many, do not pass one that waits for ever.

    `weights` has the weight of each client, and that of all others as OTHERS, or 1. The charges of at most 1024 clients
    that do not wait are kept, the largest ones.
    """

    def __init__(self, weights: Mapping[str, float], *, max_rows: int, num_slots: int) -> None:
        self._weights = weights
        self._max_rows = max_rows
        self._num_slots = num_slots
        self._charges: dict[str, float] = {}
        self._waiting: dict[str, None] = {}
        self._waiting_weight = 0.0
        self._floor = 0.0
        self._looked_s: float | None = None
        self._rows: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @property
    def num_charges(self) -> int:
        return len(self._charges)

    def look(self, holding: Iterable[Request], now_s: float) -> None:
        """Notes what the requests that hold rows have, and charges for the time since the last look, by the engine's
        clock.
        """
        if self._looked_s is not None:
            self._charge(now_s - self._looked_s)
        self._looked_s = now_s
        self._rows.clear()
        self._tokens.clear()
        for req in holding:
            assert req.lease is not None
            self.gets(req.client, req.lease.num_tokens)
        while len(self._charges) - len(self._waiting) > _MAX_IDLE:
            del self._charges[min(self._charges.keys() - self._waiting.keys(), key=self._charge_of)]

    def rest(self) -> None:
        """Charges nothing until the next look, because nobody waits."""
        self._looked_s = None

    def gets(self, client: str, num_tokens: int) -> None:
        """Notes that a client holds one row more, with `num_tokens` slots."""
        self._rows[client] += 1
        self._tokens[client] += num_tokens

    def gives(self, client: str, num_tokens: int) -> None:
        """Notes that a client holds one row less, which had `num_tokens` slots."""
        self._rows[client] -= 1
        self._tokens[client] -= num_tokens

    def standing(self, client: str) -> float:
        """Returns the client's standing with what it holds, in seconds of the whole pool."""
        return self._charge_of(client) + HORIZON_S * self._part(client)

    def standing_with(self, client: str, num_tokens: int) -> float:
        """Returns the client's standing if it held one row more, with `num_tokens` slots."""
        return self._charge_of(client) + HORIZON_S * self._part(client, num_rows=1, num_tokens=num_tokens)

    def begin_to_wait(self, client: str) -> None:
        self._charges[client] = max(self._charge_of(client), self._floor)
        self._waiting[client] = None
        self._waiting_weight += self._weight(client)

    def end_to_wait(self, client: str) -> None:
        del self._waiting[client]
        self._waiting_weight = self._waiting_weight - self._weight(client) if self._waiting else 0.0

    def _part(self, client: str, *, num_rows: int = 0, num_tokens: int = 0) -> float:
        of_rows = (self._rows[client] + num_rows) / self._max_rows
        of_slots = (self._tokens[client] + num_tokens) / self._num_slots
        return max(of_rows, of_slots) / self._weight(client)

    def _charge_of(self, client: str) -> float:
        return self._charges.get(client, self._floor)

    def _charge(self, seconds: float) -> None:
        total, weights = 0.0, self._waiting_weight
        charges = {client: self._part(client) * seconds for client in self._rows}
        for client, charge in charges.items():
            self._charges[client] = self._charge_of(client) + charge
            total += charge * self._weight(client)
            weights += 0.0 if client in self._waiting else self._weight(client)
        if total:
            self._floor += total / weights

    def _weight(self, client: str) -> float:
        return self._weights.get(client, self._weights.get(OTHERS, 1.0))
