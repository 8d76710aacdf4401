"""The queue of requests that hold no row yet."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from itertools import chain

from common.priority import Ageing
from decode_service.messages import Phase
from decode_service.schedule.request import Request
from decode_service.schedule.shares import Shares

_RETURNED = None
"""Stands in the place of a client for the line of the requests that came back."""


class WaitingQueue:
    """The requests that wait for a handoff, in the order in which they are handed off.

    A request of a better level goes before one of a worse one. The level is the request's priority, which gets better
    while it waits. It does not get better than `best_priority`, so that a client with many old requests gets no
    advantage over one with new ones.

    Among requests of one level, those that come back to the queue are first. Then clients take turns, one request per
    turn. A new client joins at the end of the line, and a client goes back to the end after its turn. So a client waits
    for at most one turn of each other client. The requests of each client, and those that came back, are in the order
    of `Request.turn`. `num_changes` counts the requests that joined or left.

    With `shares` the client that was served the fewest tokens for its weight has the next turn. Clients of equal counts
    take turns.
    """

    def __init__(self, *, ageing: Ageing, best_priority: int, shares: Shares | None = None) -> None:
        self.num_changes = 0
        self._num_waiting = 0
        self._ageing = ageing
        self._best_priority = best_priority
        self._shares = shares
        self._returned: list[Request] = []
        # Requests by client; the client with the next turn comes first
        self._newcomers: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._returned, *chain(*self._newcomers.values())])

    def level(self, req: Request, now_s: float) -> int:
        """Returns the request's priority after the time that has passed since it arrived."""
        return self._ageing.level(req.priority, waited_s=now_s - req.arrived_s, best=self._best_priority)

    def in_turn(self, now_s: float) -> Iterator[Request]:
        """Yields each waiting request once, in the order of handoff at `now_s`, a time of the engine's clock.

        If a yielded request is still in the queue when the next one is taken, its client keeps its turn. If the request
        waits for another one's KV, the other clients have their turns before the client's next request nevertheless, so
        that many requests with one beginning hold up no other client.
        """
        lines: dict[str | None, deque[Request]] = {client: deque(reqs) for client, reqs in self._newcomers.items()}
        if self._returned:
            lines[_RETURNED] = deque(self._returned)
        places = itertools.count()
        heads: list[tuple[int, bool, int, float, int, str | None]] = []

        def push(client: str | None, num_passed: int, place: int) -> None:
            """Adds a line's next request to `heads`. `num_passed` counts the turns that the client has passed on."""
            if line := lines[client]:
                count = 0.0 if self._shares is None or client is _RETURNED else self._shares.count(client)
                level = self.level(line[0], now_s)
                heapq.heappush(heads, (level, client is not _RETURNED, num_passed, count, place, client))

        for client in lines:
            push(client, 0, next(places))
        while heads:
            _, _, num_passed, _, place, client = heapq.heappop(heads)
            req = lines[client].popleft()
            yield req
            if req.phase is not Phase.QUEUE:
                place = next(places)
                if self._shares is not None and req.lease is not None:
                    self._shares.charge(req.client, len(req.token_ids) - req.num_held_tokens)
                if client is not _RETURNED and client in self._newcomers:
                    self._newcomers[client] = self._newcomers.pop(client)
            elif req.awaited is not None:
                num_passed, place = num_passed + 1, next(places)
            push(client, num_passed, place)

    def add(self, req: Request) -> None:
        self.num_changes += 1
        self._num_waiting += 1
        has_returned = req.num_attempts or req.num_retractions or req.num_failures
        if self._shares is not None and not has_returned and req.client not in self._newcomers:
            self._shares.begin_to_wait(req.client)
        line = self._returned if has_returned else self._newcomers.setdefault(req.client, [])
        insort(line, req, key=_turn)

    def remove(self, req: Request) -> None:
        """Removes a request that is in the queue."""
        self.num_changes += 1
        self._num_waiting -= 1
        for line in (self._returned, self._newcomers.get(req.client, [])):
            place = bisect_left(line, req.turn, key=_turn)
            if line[place : place + 1] == [req]:
                del line[place]
        if self._newcomers.get(req.client) == []:
            del self._newcomers[req.client]
            if self._shares is not None:
                self._shares.end_to_wait(req.client)


def _turn(req: Request) -> tuple[float, int]:
    return req.turn
