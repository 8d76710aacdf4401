"""Gives callers turns at work that only few can have done at the same time, so that no client waits for another one's
queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.rpc.fair_shares import Caller


@dataclass(slots=True)
class _Line:
    """The callers that wait for one tenant, how many have a turn, and the seconds that the tenant has used since it
    came.
    """

    used_s: float
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    num_turns: int = 0


@dataclass(slots=True)
class _ClientLines:
    """The lines of a client's tenants, the seconds that they have used together, and how many wait in them."""

    used_s: float
    lines: dict[str, _Line] = field(default_factory=dict)
    num_waiting: int = 0


class Turns:
    """Gives clients turns, `num_places` callers at a time. The next turn goes to the waiting client that has used the
    least time, and among that client's tenants to the one that has used the least. Use it on one event loop.

    So a client whose work takes long delays another one by at most one turn of its own in each place, however many
    tenants it names. A newcomer begins with the least time of the clients present.
    """

    def __init__(self, num_places: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free = num_places
        self._clock = clock
        self._clients: dict[str, _ClientLines] = {}  # at equal times, the one whose turn was longest ago first

    async def take(self, caller: Caller) -> float:
        """Waits for the caller's turn. Returns the present time, to be passed to `give_back`."""
        name, tenant = caller
        if (client := self._clients.get(name)) is None:
            client = self._clients[name] = _ClientLines(_least(self._clients))
        if (line := client.lines.get(tenant)) is None:
            line = client.lines[tenant] = _Line(_least(client.lines))
        if self._num_free:
            self._begin(line)
            return self._clock()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append(turn)
        client.num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came just before
                self._end(caller)
            raise
        return self._clock()

    def give_back(self, caller: Caller, began_s: float) -> None:
        """Ends a turn of `caller`, which it has had since `began_s`."""
        used_s = self._clock() - began_s
        client = self._clients[caller[0]]
        client.used_s += used_s
        client.lines[caller[1]].used_s += used_s
        self._end(caller)

    def _begin(self, line: _Line) -> None:
        self._num_free -= 1
        line.num_turns += 1

    def _end(self, caller: Caller) -> None:
        self._num_free += 1
        self._clients[caller[0]].lines[caller[1]].num_turns -= 1
        self._pass_on()
        self._forget_if_gone(caller)

    def _pass_on(self) -> None:
        while self._num_free and (names := [name for name, each in self._clients.items() if each.num_waiting]):
            name = min(names, key=lambda name: self._clients[name].used_s)
            client = self._clients[name] = self._clients.pop(name)
            lines = client.lines
            tenant = min([name for name, each in lines.items() if each.waiting], key=lambda name: lines[name].used_s)
            line = lines[tenant] = lines.pop(tenant)
            turn = line.waiting.popleft()
            client.num_waiting -= 1
            if turn.cancelled():
                self._forget_if_gone((name, tenant))
            else:
                self._begin(line)
                turn.set_result(None)

    def _forget_if_gone(self, caller: Caller) -> None:
        """Forgets a tenant for whom nobody waits or has a turn, and its client if it has no other tenant."""
        name, tenant = caller
        client = self._clients.get(name)
        line = None if client is None else client.lines.get(tenant)
        if client is not None and line is not None and not line.waiting and not line.num_turns:
            del client.lines[tenant]
            if not client.lines:
                del self._clients[name]


def _least(present: Mapping[str, _ClientLines | _Line]) -> float:
    return min([each.used_s for each in present.values()], default=0.0)
