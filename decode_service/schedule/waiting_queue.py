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


class WaitingQueue:
    """The requests that wait for a handoff, in the order in which they are handed off.

    A request of a better level goes before one of a worse one. The level is the request's priority, which gets better
    while it waits. It does not get better than `best_priority`, so that a client with many old requests gets no
    advantage over one with new ones.

    Among requests of one level, the client goes first whose standing in `shares` would be the smallest with its next
    request. Clients of equal standing take turns: a new one joins at the end of the line, and goes back there after its
    turn. The requests of each client are in the order of `Request.turn`, also those that come back to the queue.
    `num_changes` counts the requests that joined or left.
    """

    def __init__(self, *, ageing: Ageing, best_priority: int, shares: Shares) -> None:
        self.num_changes = 0
        self._num_waiting = 0
        self._ageing = ageing
        self._best_priority = best_priority
        self._shares = shares
        # Requests by client; of clients of equal standing the one with the next turn comes first
        self._lines: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(list(self._lines.values()))

    def level(self, req: Request, now_s: float) -> int:
        """Returns the request's priority after the time that has passed since it arrived."""
        return self._ageing.level(req.due_s, now_s=now_s, best=self._best_priority)

    def in_turn(self, now_s: float) -> Iterator[Request]:
        """Yields each waiting request once, in the order of handoff at `now_s`, a time of the engine's clock.

        If a yielded request is still in the queue when the next one is taken, its client keeps its turn. If the request
        waits for another one's KV, the other clients have their turns before the client's next request nevertheless, so
        that many requests with one beginning hold up no other client.
        """
        lines = {client: deque(reqs) for client, reqs in self._lines.items()}
        places = itertools.count()
        heads: list[tuple[int, int, float, int, str]] = []

        def push(client: str, num_passed: int, place: int) -> None:
            """Adds a line's next request to `heads`. `num_passed` counts the turns that the client has passed on."""
            if line := lines[client]:
                standing = self._shares.standing_with(client, len(line[0].token_ids))
                heapq.heappush(heads, (self.level(line[0], now_s), num_passed, standing, place, client))

        for client in lines:
            push(client, 0, next(places))
        while heads:
            _, num_passed, _, place, client = heapq.heappop(heads)
            req = lines[client].popleft()
            yield req
            if req.phase is not Phase.QUEUE:
                place = next(places)
                if req.lease is not None:
                    self._shares.gets(client, req.lease.num_tokens)
                if client in self._lines:
                    self._lines[client] = self._lines.pop(client)
            elif req.awaited is not None:
                num_passed, place = num_passed + 1, next(places)
            push(client, num_passed, place)

    def add(self, req: Request) -> None:
        self.num_changes += 1
        self._num_waiting += 1
        if req.client not in self._lines:
            self._lines[req.client] = []
            self._shares.begin_to_wait(req.client)
        insort(self._lines[req.client], req, key=_turn)

    def remove(self, req: Request) -> None:
        """Removes a request that is in the queue."""
        self.num_changes += 1
        self._num_waiting -= 1
        line = self._lines[req.client]
        place = bisect_left(line, req.turn, key=_turn)
        assert line[place] is req
        del line[place]
        if not line:
            del self._lines[req.client]
            self._shares.end_to_wait(req.client)


def _turn(req: Request) -> tuple[float, int]:
    return req.turn
