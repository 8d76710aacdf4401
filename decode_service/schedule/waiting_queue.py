"""The queue of requests that hold no row yet."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from common.priority import Ageing
from decode_service.messages import Phase
from decode_service.schedule.request import Request, Sharer
from decode_service.schedule.shares import Shares


class WaitingQueue:
    """The requests that wait for a handoff, in the order in which they are handed off.

    A request of a better level goes before one of a worse one. The level is the request's priority, which gets better
    while it waits. It does not get better than `best_priority`, so that a client with many old requests gets no
    advantage over one with new ones.

    Among requests of one level, the client goes first whose standing in `shares` would be the smallest with its next
    request, and among the tenants of a client the one with the smallest of theirs. Those of equal standing take turns:
    a new one joins at the end of the line, and goes back there after its turn. The requests of each tenant are in the
    order of `Request.turn`, also those that come back to the queue. `num_changes` counts the requests that joined or
    left.
    """

    def __init__(self, *, ageing: Ageing, best_priority: int, shares: Shares) -> None:
        self.num_changes = 0
        self._num_waiting = 0
        self._ageing = ageing
        self._best_priority = best_priority
        self.shares = shares
        # Requests by client and tenant; of those of equal standing the one with the next turn comes first
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

        If a yielded request is still in the queue when the next one is taken, its client keeps its turn. If the request
        waits for another one's KV, the others have their turns before the tenant's next request nevertheless, so that
        many requests with one beginning hold up nobody else.
        """
        lines = {(client, tenant): deque(line) for client, own in self._lines.items() for tenant, line in own.items()}
        places = itertools.count()
        tenants: dict[str, list[tuple[int, int, float, int, str]]] = {client: [] for client in self._lines}
        clients: list[tuple[int, int, float, int, str]] = []

        def push_tenant(sharer: Sharer, num_passed: int, place: int) -> None:
            """Adds a line's next request to its client's. `num_passed` counts the turns that it has passed on."""
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
                if req.lease is not None:
                    self.shares.gets(sharer, req.lease.num_tokens)
                if (own := self._lines.pop(client, None)) is not None:
                    self._lines[client] = own
                    if tenant in own:
                        own[tenant] = own.pop(tenant)
            elif req.awaited is not None:
                num_passed, place, client_place = num_passed + 1, next(places), next(places)
            push_tenant(sharer, num_passed, place)
            push_client(client, client_place)

    def first_of_each_client(self, now_s: float) -> Iterator[Request]:
        """Yields, of each client that has several tenants, the waiting request that is its next."""
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
