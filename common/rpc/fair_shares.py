"""What clients share fairly: a limited number of places, and of bytes. One client alone cannot lock out others.

Places:
                ├─────────────── num_places ───────────────┤── an eighth ──┤
one client      ███████████████████████████████████████████
a second one    gets some of the extra eighth at once:      ░░░░░
                and its fair share as places become free
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable

_LATE_S = 1.0
"""How many seconds late a refused client may ask again before its place is no longer kept."""
_MAX_WISHERS = 256
_MAX_RETRY_AFTER_S = 60
_NEW_SHARE = 0.1


class Full(Exception):
    """There is no place for this client now. There may be one after `retry_after_s` seconds."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"no place for {retry_after_s} s")
        self.retry_after_s = retry_after_s


class FairPlaces:
    """Gives places to clients, which are identified by name. Call it from one thread only.

    A refused client is told when to ask again. Until then, places that become free are kept for it, up to its share,
    and up to an eighth of all places for all waiting clients together. The share is the same for every client that
    holds or wants places. There are also an eighth more places than `num_places`, only for clients below their share.
    """

    def __init__(self, num_places: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_places = num_places
        self._num_extra = max(1, num_places // 8)
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._num_held = 0
        self._wishes: dict[
            str, list[float]
        ] = {}  # for each refused request, until when a place is kept; earliest first
        self._mean_held_s = 0.0

    def __len__(self) -> int:
        return self._num_held

    def take(self, client: str) -> float:
        """Takes a place for `client`. Returns the present time, to be passed to `give_back`. Raises Full."""
        now_s = self._clock()
        self._forget_wishes(now_s)
        may_take = self._may_take(client)
        wishes = self._wishes.pop(client, [])
        if wishes and (may_take or wishes[0] <= now_s + _LATE_S):  # the one that was to come by now has come
            del wishes[0]
        if wishes:
            self._wishes[client] = wishes
        if not may_take:
            retry_after_s = self._retry_after_s()
            insort(wishes, now_s + retry_after_s + _LATE_S)
            self._wishes[client] = wishes[-self._share(client) :]
            if len(self._wishes) > _MAX_WISHERS:
                del self._wishes[next(iter(self._wishes))]
            raise Full(retry_after_s)
        self._held[client] += 1
        self._num_held += 1
        return now_s

    def hand_over(self, holder: str, client: str) -> float:
        """Moves a place from `holder` to `client`, which `take` has just refused. Returns the present time, to be
        passed to `give_back`.
        """
        del self._wishes[client][-1:]
        if not self._wishes[client]:
            del self._wishes[client]
        self._held[client] += 1
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]
        return self._clock()

    def give_back(self, client: str, taken_s: float) -> None:
        """Gives back a place of `client`. `taken_s` is what `take` or `hand_over` returned."""
        self._num_held -= 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        held_s = self._clock() - taken_s
        self._mean_held_s += (_NEW_SHARE if self._mean_held_s else 1.0) * (held_s - self._mean_held_s)

    def _may_take(self, client: str) -> bool:
        num_free, num_own = self.num_places - self._num_held, self._held[client]
        others = self._wishes.keys() - {client}
        if num_free > 0 and not others:
            return True
        num_clients, share = self._num_clients(client), self._share(client)
        if num_free > 0:
            kept = sum(min(len(self._wishes[each]), max(0, share - self._held[each])) for each in others)
            return num_own < share or num_free > min(kept, self._num_extra)
        if num_clients == 1:
            return False
        part = max(1, self._num_extra // (num_clients - 1))
        return num_own < min(share, part) and -num_free < self._num_extra

    def _num_clients(self, client: str) -> int:
        return len(self._held.keys() | self._wishes.keys() | {client})

    def _share(self, client: str) -> int:
        return max(1, self.num_places // self._num_clients(client))

    def _retry_after_s(self) -> int:
        """Returns in about how many seconds enough places are free for all refused requests and this one.

        The estimate assumes that places are held as long as recent ones. It is at most `_MAX_RETRY_AFTER_S`.
        """
        num_wanted = 1 + sum(map(len, self._wishes.values()))
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(num_wanted * self._mean_held_s / self.num_places)))

    def _forget_wishes(self, now_s: float) -> None:
        for client, untils in tuple(self._wishes.items()):
            if left := [until_s for until_s in untils if until_s > now_s]:
                self._wishes[client] = left
            else:
                del self._wishes[client]


class NoRoom(Exception):
    """The client cannot have so many bytes now."""


class FairBytes:
    """Lends up to `max_bytes` to clients, which are identified by name. Call it from one thread only.

    One client may hold at most half of them. A request for more than half takes half.
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
