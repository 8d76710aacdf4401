"""The queue of requests that hold no row yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from decode_service.messages import Phase
from decode_service.schedule.request import Request


class WaitingQueue:
    """The requests that wait for a handoff, in the order in which they are handed off.

    Requests that come back to the queue are first, the oldest of them before the others. After them clients take turns,
    one request per turn. A new client joins at the end of the line, and a client goes back to the end after its turn.
    So a client waits for at most one turn of each other client. Each client's requests keep their order. `num_changes`
    counts the requests that joined or left.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._num_waiting = 0
        self._returned: dict[int, Request] = {}
        # Requests by client; the client with the next turn comes first
        self._newcomers: dict[str, dict[int, Request]] = {}

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._returned.values(), *chain(*(reqs.values() for reqs in self._newcomers.values()))])

    def in_turn(self) -> Iterator[Request]:
        """Yields each waiting request once, in the order of handoff.

        If a yielded request is still in the queue when the next one is taken, its client keeps its turn. If the request
        waits for another one's KV, the other clients have their turns before the client's next request nevertheless, so
        that many requests with one beginning hold up no other client.
        """
        yield from list(self._returned.values())
        clients = deque(self._newcomers)
        rest: dict[str, deque[Request]] = {}
        while clients:
            client = clients[0]
            if client not in rest:
                rest[client] = deque(self._newcomers[client].values())
            if not rest[client]:
                clients.popleft()
                continue
            req = rest[client].popleft()
            yield req
            has_left = req.phase is not Phase.QUEUE
            if has_left or req.awaited is not None:
                clients.rotate(-1)
            if has_left and client in self._newcomers:
                self._newcomers[client] = self._newcomers.pop(client)

    def add(self, req: Request) -> None:
        self.num_changes += 1
        self._num_waiting += 1
        if not (req.num_attempts or req.num_retractions or req.num_failures):
            self._newcomers.setdefault(req.client, {})[req.arrival] = req
            return
        is_youngest = not self._returned or req.arrival > next(reversed(self._returned))
        self._returned[req.arrival] = req
        if not is_youngest:
            self._returned = dict(sorted(self._returned.items()))

    def remove(self, req: Request) -> None:
        """Removes a request that is in the queue."""
        self.num_changes += 1
        self._num_waiting -= 1
        self._returned.pop(req.arrival, None)
        reqs = self._newcomers.get(req.client, {})
        if reqs.pop(req.arrival, None) is not None and not reqs:
            del self._newcomers[req.client]
