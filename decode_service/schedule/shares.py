"""What clients hold of the decode service's pool, what they have held, and so whose turn it is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from decode_service.schedule.request import Request, Sharer

OTHERS = "*"
"""Stands for all clients without a weight of their own."""
HORIZON_S = 10.0
"""For how long a client is expected to keep what it holds. What one held long ago counts for as little as that."""
_MAX_IDLE = 1024


class _Siblings:
    """What those who share one whole were charged, by name, and which of them wait."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._charges: dict[str, float] = {}
        self._waiting: dict[str, None] = {}
        self._floor = 0.0

    @property
    def num_charges(self) -> int:
        return len(self._charges)

    def weight(self, name: str) -> float:
        return self._weights.get(name, self._weights.get(OTHERS, 1.0))

    def charge_of(self, name: str) -> float:
        return self._charges.get(name, self._floor)

    def charge(self, parts: Mapping[str, float], seconds: float) -> None:
        """Charges each for what it holds, in parts of the whole divided by weights, for `seconds`."""
        for name, part in parts.items():
            self._charges[name] = self.charge_of(name) + part * seconds
        total = sum(part * self.weight(name) for name, part in parts.items())
        if total:
            self._floor += total * seconds / sum(map(self.weight, {**self._waiting, **dict.fromkeys(parts)}))

    def begin_to_wait(self, name: str) -> None:
        self._charges[name] = max(self.charge_of(name), self._floor)
        self._waiting[name] = None

    def end_to_wait(self, name: str) -> None:
        del self._waiting[name]

    def forget_idle(self) -> None:
        while len(self._charges) - len(self._waiting) > _MAX_IDLE:
            del self._charges[min(self._charges.keys() - self._waiting.keys(), key=self.charge_of)]


class Shares:
    """Says which client is served first, and which gives way. Only the engine thread calls it.

    A client's part is what it holds of the pool's rows or of its slots, whichever is more, divided by its weight. While
    requests wait, each client is charged its part for every second. The client with the smallest standing, which is its
    charge and HORIZON_S times its part, has the next turn, and the one with the largest gives way. So clients that
    always have requests waiting hold parts in proportion to their weights, and over time also where parts are coarse.
    The tenants of one client share what it holds in the same way, all with the same weight.

    Who begins to wait gets at least the charge of one that had always held what is its by its weight: it has saved
    nothing up while it did not ask. That charge grows with all that anyone is charged, so clients that come for the
    first time, however many, do not pass one that waits for ever.

    `weights` has the weight of each client, and that of all others as OTHERS, or 1. The charges of at most 1024 clients
    that do not wait are kept, the largest ones.
    """

    def __init__(self, weights: Mapping[str, float], *, max_rows: int, num_slots: int) -> None:
        self._max_rows = max_rows
        self._num_slots = num_slots
        self._clients = _Siblings(weights)
        self._tenants: dict[str, _Siblings] = {}  # of each client of which some wait or hold rows
        self._num_waiting: Counter[str] = Counter()  # tenants of each client
        self._looked_s: float | None = None
        self._rows: Counter[Sharer | str] = Counter()
        self._tokens: Counter[Sharer | str] = Counter()

    @property
    def num_charges(self) -> int:
        return self._clients.num_charges

    def num_tenants(self, client: str) -> int:
        """Returns how many tenants of a client have waited or held rows lately."""
        return self._tenants[client].num_charges if client in self._tenants else 0

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
            self.gets(req.sharer, req.lease.num_tokens)
        self._clients.forget_idle()
        idle = self._tenants.keys() - self._num_waiting.keys() - {client for client, _ in self._sharers()}
        for client in idle:
            del self._tenants[client]
        for tenants in self._tenants.values():
            tenants.forget_idle()

    def rest(self) -> None:
        """Charges nothing until the next look, because nobody waits."""
        self._looked_s = None

    def gets(self, sharer: Sharer, num_tokens: int) -> None:
        """Notes that a client, for one of its tenants, holds one row more, with `num_tokens` slots."""
        for node in (sharer[0], sharer):
            self._rows[node] += 1
            self._tokens[node] += num_tokens

    def gives(self, sharer: Sharer, num_tokens: int) -> None:
        """Notes that a client holds one row less, which had `num_tokens` slots."""
        for node in (sharer[0], sharer):
            self._rows[node] -= 1
            self._tokens[node] -= num_tokens

    def standing(self, sharer: Sharer) -> tuple[float, float]:
        """Returns the standing of a client, and that of its tenant, with what they hold, in seconds of the pool."""
        return self.client_standing(sharer), self.tenant_standing(sharer)

    def client_standing(self, sharer: Sharer, num_tokens: int | None = None) -> float:
        """Returns the client's standing; with `num_tokens` as if it held one row more, with so many slots."""
        return self._clients.charge_of(sharer[0]) + HORIZON_S * self._part(sharer[0], num_tokens)

    def tenant_standing(self, sharer: Sharer, num_tokens: int | None = None) -> float:
        """Returns the standing of a tenant among those of its client; with `num_tokens` as above."""
        tenants = self._tenants.get(sharer[0])
        charge = 0.0 if tenants is None else tenants.charge_of(sharer[1])
        return charge + HORIZON_S * self._part(sharer, num_tokens)

    def is_behind(self, sharer: Sharer, waiting: Sharer, num_tokens: int) -> bool:
        """Returns whether a client, or the tenant if the client is the same, stands behind one that waits, even if that
        held one row more, with `num_tokens` slots.
        """
        if sharer[0] != waiting[0]:
            return self.client_standing(sharer) > self.client_standing(waiting, num_tokens)
        return self.tenant_standing(sharer) > self.tenant_standing(waiting, num_tokens)

    def begin_to_wait(self, sharer: Sharer) -> None:
        client, tenant = sharer
        if not self._num_waiting[client]:
            self._clients.begin_to_wait(client)
        self._num_waiting[client] += 1
        self._tenants.setdefault(client, _Siblings({})).begin_to_wait(tenant)

    def end_to_wait(self, sharer: Sharer) -> None:
        client, tenant = sharer
        self._tenants[client].end_to_wait(tenant)
        self._num_waiting[client] -= 1
        if not self._num_waiting[client]:
            del self._num_waiting[client]
            self._clients.end_to_wait(client)

    def _sharers(self) -> Iterator[Sharer]:
        return (node for node in self._rows if isinstance(node, tuple))

    def _part(self, node: Sharer | str, num_tokens: int | None = None) -> float:
        num_more = 0 if num_tokens is None else 1
        of_rows = (self._rows[node] + num_more) / self._max_rows
        of_slots = (self._tokens[node] + (num_tokens or 0)) / self._num_slots
        return max(of_rows, of_slots) / (self._clients.weight(node) if isinstance(node, str) else 1.0)

    def _charge(self, seconds: float) -> None:
        parts: dict[str, float] = {}
        of_tenants: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for client, tenant in self._sharers():
            parts[client] = self._part(client)
            of_tenants[client][tenant] = self._part((client, tenant))
        self._clients.charge(parts, seconds)
        for client, tenants in of_tenants.items():
            self._tenants.setdefault(client, _Siblings({})).charge(tenants, seconds)
