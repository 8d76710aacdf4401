"""The queue of requests that hold no row yet, and the shares that decide which client gets the next row, and which
gives one up, by what each holds of the pool and has held.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from common.priority import Ageing
from decode_service.messages import Phase
from decode_service.schedule.request import Request, Sharer

OTHERS = "*"
"""Stands for all clients without a weight of their own."""
HORIZON_S = 10.0
"""For how long a client is expected to keep what it holds. Where there is too little for all, turns are up to twice as
long.
"""
_MAX_IDLE = 1024


class WaitingQueue:
    """The requests that wait for a handoff, in the order in which they are handed off.

    A request of a better level goes before one of a worse one. The level is the request's priority, which gets better
    while it waits. It does not get better than `best_priority`, so that a client with many old requests gets no
    advantage over one with new ones.

    Among requests of one level, the client comes first whose standing in `shares` would be smallest if it also held its
    next request's row; the same holds among a client's tenants. Clients or tenants of equal standing take turns: a new
    one joins the end of the line, and goes back there after its turn. Each tenant's requests are in the order of
    `Request.turn`, also those that come back to the queue. `num_changes` counts the requests that joined or left.
    """

    def __init__(self, *, ageing: Ageing, best_priority: int, shares: Shares) -> None:
        self.num_changes = 0
        self._num_waiting = 0
        self._ageing = ageing
        self._best_priority = best_priority
        self.shares = shares
        # Requests by client and tenant; at equal standing the client or tenant with the next turn comes first
        self._lines: dict[str, dict[str, list[Request]]] = {}

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return iter([req for lines in self._lines.values() for line in lines.values() for req in line])

    def level(self, req: Request, now_s: float) -> int:
        """Returns the request's priority after the time that has passed since it arrived."""
        return self._ageing.level(req.due_s, now_s=now_s, best=self._best_priority)

    def in_turn(self, now_s: float) -> Iterator[Request]:
        """Yields each waiting request once, in the order of handoff at `now_s`, a time of the engine's clock.

        If a yielded request gets a row before the next one is taken, its client's turn is over (`started`). Else the
        client keeps its turn. But if that request waits for another one's KV, others have their turns before the
        tenant's next request. So many requests with one beginning hold up nobody else.
        """
        lines = {(client, tenant): deque(line) for client, own in self._lines.items() for tenant, line in own.items()}
        places = itertools.count()
        tenants: dict[str, list[tuple[int, int, float, int, str]]] = {client: [] for client in self._lines}
        clients: list[tuple[int, int, float, int, str]] = []

        def push_tenant(sharer: Sharer, num_passed: int, place: int) -> None:
            """Adds a tenant's next request to its client's heap. `num_passed` counts the turns it has passed on."""
            if line := lines[sharer]:
                standing = self.shares.tenant_with(sharer, len(line[0].token_ids))
                item = (self.level(line[0], now_s), num_passed, standing, place, sharer[1])
                heapq.heappush(tenants[sharer[0]], item)

        def push_client(client: str, place: int) -> None:
            if tenants[client]:
                level, num_passed, _, _, tenant = tenants[client][0]
                sharer = client, tenant
                standing = self.shares.client_with(sharer, len(lines[sharer][0].token_ids))
                heapq.heappush(clients, (level, num_passed, standing, place, client))

        for sharer in lines:
            push_tenant(sharer, 0, next(places))
        for client in self._lines:
            push_client(client, next(places))
        while clients:
            *_, client_place, client = heapq.heappop(clients)
            _, num_passed, _, place, tenant = heapq.heappop(tenants[client])
            sharer = client, tenant
            req = lines[sharer].popleft()
            yield req
            if req.phase is not Phase.QUEUE:
                place, client_place = next(places), next(places)
            elif req.awaited is not None:
                num_passed, place, client_place = num_passed + 1, next(places), next(places)
            push_tenant(sharer, num_passed, place)
            push_client(client, client_place)

    def started(self, req: Request) -> None:
        """Notes that a request of the queue got a row: its client and its tenant go to the end of the line."""
        assert req.lease is not None
        self.shares.gets(req.sharer, req.lease.num_tokens)
        if (own := self._lines.pop(req.client, None)) is not None:
            self._lines[req.client] = own
            if req.tenant in own:
                own[req.tenant] = own.pop(req.tenant)

    def first_of_each_client(self, now_s: float) -> Iterator[Request]:
        """Yields the next waiting request of each client that has several tenants."""
        for client, own in self._lines.items():
            if self.shares.num_tenants(client) > 1:
                firsts = [line[0] for line in own.values()]
                yield min(
                    firsts,
                    key=lambda req: (
                        self.level(req, now_s),
                        self.shares.tenant_with(req.sharer, len(req.token_ids)),
                    ),
                )

    def add(self, req: Request) -> None:
        self.num_changes += 1
        self._num_waiting += 1
        own = self._lines.setdefault(req.client, {})
        if req.tenant not in own:
            own[req.tenant] = []
            self.shares.begin_to_wait(req.sharer)
        insort(own[req.tenant], req, key=_turn)

    def remove(self, req: Request) -> None:
        """Removes a request that is in the queue."""
        self.num_changes += 1
        self._num_waiting -= 1
        own = self._lines[req.client]
        line = own[req.tenant]
        place = bisect_left(line, req.turn, key=_turn)
        assert line[place] is req
        del line[place]
        if not line:
            del own[req.tenant]
            self.shares.end_to_wait(req.sharer)
        if not own:
            del self._lines[req.client]


def _turn(req: Request) -> tuple[float, int]:
    return req.turn


Node: TypeAlias = Sharer | str
"""A tenant of a client, or a client."""


class _Siblings:
    """Keeps the charges (see `Shares`), by name, of all clients, or of the tenants of one client."""

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
        """Charges each name for holding its part (see `Shares`) for `seconds`."""
        for name, part in parts.items():
            self._charges[name] = self.charge_of(name) + part * seconds
        total = sum(part * self.weight(name) for name, part in parts.items())
        if total:
            self._floor += total * seconds / self.weight_of_those_that_wait_and(parts)

    def weight_of_those_that_wait_and(self, others: Iterable[str]) -> float:
        return sum(map(self.weight, {**self._waiting, **dict.fromkeys(others)}))

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

    A client's part is its fraction of the pool's rows or of its slots, whichever is larger, divided by its weight.
    While requests wait, each client is charged its part for every second. A client's standing is its charge plus
    HORIZON_S times its part. The client with the smallest standing has the next turn, and the one with the largest
    gives way. So clients that always have requests waiting hold rows and slots in proportion to their weights; where
    there are too few for all, they do so over time. Where there are enough, the first row of a client counts for at
    most its fair part, so that a client of small weight does not wait until others have been charged for more. The
    tenants of one client share what it holds in the same way, all with the same weight.

    A client that begins to wait gets at least the charge of one that always held its fair part: not asking saves
    nothing up. That charge grows whenever anyone is charged, so new clients, however many, cannot pass a waiting one
    for ever.

    `weights` has weights by client; OTHERS stands for all others, whose weight is 1 by default. Of clients that do not
    wait, the 1024 largest charges are kept.
    """

    def __init__(self, weights: Mapping[str, float], *, max_rows: int, num_slots: int) -> None:
        self._max_rows = max_rows
        self._num_slots = num_slots
        self._clients = _Siblings(weights)
        self._tenants: dict[str, _Siblings] = {}  # by client, if any of them wait or hold rows
        self._num_waiting: Counter[str] = Counter()  # waiting tenants, by client
        self._looked_s: float | None = None
        # At the last look: the fair part of a client, what its first row counts for at most, and how many tenants share
        # the part of each client
        self._fair = 1.0
        self._first_row = math.inf
        self._num_tenants: dict[str, float] = {}
        self._rows: Counter[Node] = Counter()
        self._tokens: Counter[Node] = Counter()

    @property
    def num_charges(self) -> int:
        return self._clients.num_charges

    def num_tenants(self, client: str) -> int:
        """Returns how many tenants of a client have waited or held rows lately."""
        return self._tenants[client].num_charges if client in self._tenants else 0

    def look(self, holding: Iterable[Request], now_s: float) -> None:
        """Notes what the requests `holding` rows hold, and charges clients for the time since the last look."""
        if self._looked_s is not None:
            self._charge(now_s - self._looked_s)
        self._looked_s = now_s
        self._rows.clear()
        self._tokens.clear()
        held: dict[Sharer, list[int]] = {}  # each step may look, so rows are added up before anything else
        for req in holding:
            assert req.lease is not None
            held.setdefault(req.sharer, []).append(req.lease.num_tokens)
        for sharer, nums_tokens in held.items():
            self.gets(sharer, sum(nums_tokens), num_rows=len(nums_tokens))
        self._clients.forget_idle()
        of_holders: defaultdict[str, set[str]] = defaultdict(set)
        for client, tenant in self._sharers():
            of_holders[client].add(tenant)
        for client in self._tenants.keys() - self._num_waiting.keys() - of_holders.keys():
            del self._tenants[client]
        self._fair = 1.0 / (self._clients.weight_of_those_that_wait_and(of_holders) or 1.0)
        num_clients = len(self._num_waiting.keys() | of_holders.keys())
        self._first_row = self._fair if num_clients <= self._max_rows else math.inf
        self._num_tenants = {
            client: tenants.weight_of_those_that_wait_and(of_holders[client]) or 1.0
            for client, tenants in self._tenants.items()
        }
        for tenants in self._tenants.values():
            tenants.forget_idle()

    def rest(self) -> None:
        """Charges nothing until the next look, because nobody waits."""
        self._looked_s = None

    def copy(self) -> Shares:
        """Returns a copy for questions: `gets` and `gives` change nothing here. Both have the same charges."""
        other = copy.copy(self)
        other._rows, other._tokens = self._rows.copy(), self._tokens.copy()
        return other

    def gets(self, sharer: Sharer, num_tokens: int, *, num_rows: int = 1) -> None:
        """Notes that a client holds `num_rows` rows more for one of its tenants, with `num_tokens` slots together."""
        for node in (sharer[0], sharer):
            self._rows[node] += num_rows
            self._tokens[node] += num_tokens

    def gives(self, sharer: Sharer, num_tokens: int) -> None:
        """Notes that a client holds one row less, which had `num_tokens` slots."""
        self.gets(sharer, -num_tokens, num_rows=-1)

    def standing(self, sharer: Sharer) -> tuple[float, float]:
        """Returns the standings of a client and of its tenant, in seconds of holding the whole pool."""
        tenants = self._tenants.get(sharer[0])
        charge = 0.0 if tenants is None else tenants.charge_of(sharer[1])
        return (
            self._clients.charge_of(sharer[0]) + HORIZON_S * self._part(sharer[0]),
            charge + HORIZON_S * self._part(sharer),
        )

    def client_with(self, sharer: Sharer, num_tokens: int) -> float:
        """Returns the standing of a client if it held one row more, with `num_tokens` slots."""
        return self._clients.charge_of(sharer[0]) + HORIZON_S * self._part(sharer[0], 1, num_tokens)

    def tenant_with(self, sharer: Sharer, num_tokens: int) -> float:
        """Returns the standing of a tenant that waits, among those of its client, if it held one row more."""
        return self._tenants[sharer[0]].charge_of(sharer[1]) + HORIZON_S * self._part(sharer, 1, num_tokens)

    def gives_way(self, sharer: Sharer, num_given: int, waiting: Sharer, num_tokens: int) -> bool:
        """Returns whether a request with `num_given` slots gives way to one that waits and takes `num_tokens`.

        The two clients are compared; if they are the same, their tenants. The holder gives way if its standing is
        larger even when the waiter has got its row, and one of these is true: the holder keeps at least as large a part
        as the waiter gets; it holds more than its fair part, and the waiter would not; or its charge is larger by
        HORIZON_S times its part. By the last rule, parts that are too coarse for all are held in turn.
        """
        holder: Node
        waiter: Node
        if sharer[0] == waiting[0]:
            holder, waiter, siblings = sharer, waiting, self._tenants[sharer[0]]
            charges = siblings.charge_of(sharer[1]), siblings.charge_of(waiting[1])
            fair = self._clients.weight(sharer[0]) * self._fair / self._num_tenants[sharer[0]]
        else:
            holder, waiter, fair = sharer[0], waiting[0], self._fair
            charges = self._clients.charge_of(holder), self._clients.charge_of(waiter)
        held, gained = self._part(holder), self._part(waiter, 1, num_tokens)
        if charges[0] + HORIZON_S * held <= charges[1] + HORIZON_S * gained:
            return False
        left = self._part(holder, -1, -num_given)
        return left >= gained or held > fair >= gained or charges[0] - charges[1] >= HORIZON_S * held

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

    def _part(self, node: Node, num_rows: int = 0, num_tokens: int = 0) -> float:
        """Returns the part of a client or tenant if it held so many more rows and slots."""
        weight = self._clients.weight(node) if isinstance(node, str) else 1.0
        of_rows = (self._rows[node] + num_rows) / self._max_rows / weight
        of_slots = (self._tokens[node] + num_tokens) / self._num_slots / weight
        if isinstance(node, str) and not self._rows[node]:
            of_rows = min(of_rows, self._first_row)
        return max(of_rows, of_slots)

    def _charge(self, seconds: float) -> None:
        parts: dict[str, float] = {}
        of_tenants: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for client, tenant in self._sharers():
            parts[client] = self._part(client)
            of_tenants[client][tenant] = self._part((client, tenant))
        self._clients.charge(parts, seconds)
        for client, tenants in of_tenants.items():
            self._tenants.setdefault(client, _Siblings({})).charge(tenants, seconds)
