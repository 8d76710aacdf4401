"""Places that clients share: who is alone may have all of them, and nobody keeps the others out.

            ├─────────────── num_places ───────────────┤── an eighth ──┤
one client  ███████████████████████████████████████████
another     is refused no more than it must be:         ░░░░░  up to its part of the eighth, at once,
            and as places become free                   up to its share of all
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

_LATE_S = 1.0
"""Who was told when to come again may be so late."""
_MAX_WISHERS = 256
_MAX_RETRY_AFTER_S = 60
_NEW_SHARE = 0.1


class Full(Exception):
    """There is no place for this client now; `retry_after_s` is when there may be one."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"no place for {retry_after_s} s")
        self.retry_after_s = retry_after_s


class FairPlaces:
    """One thread only. A client is whoever bears the name.

    A client that was refused is expected to ask again when it was told to: until then what becomes free is kept for it,
    up to its share, which is the same for all who hold or want places, and up to an eighth of all places for all who
    wait. Clients below their share find an eighth more places, which those above it cannot take.
    """

    def __init__(self, num_places: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_places = num_places
        self._num_extra = max(1, num_places // 8)
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._num_held = 0
        self._wishes: dict[str, list[float]] = {}  # until when each refused request is waited for; the oldest first
        self._mean_held_s = 0.0

    def __len__(self) -> int:
        return self._num_held

    def take(self, client: str) -> float:
        """Returns the time, which `give_back` wants to know. Raises Full."""
        now_s = self._clock()
        self._forget_wishes(now_s)
        if not self._may_take(client):
            retry_after_s = self._retry_after_s()
            wishes = self._wishes.pop(client, [])
            wishes.append(now_s + retry_after_s + _LATE_S)
            self._wishes[client] = wishes[-self._share(client) :]
            if len(self._wishes) > _MAX_WISHERS:
                del self._wishes[next(iter(self._wishes))]
            raise Full(retry_after_s)
        wishes = self._wishes.get(client, [])
        del wishes[:1]
        if not wishes:
            self._wishes.pop(client, None)
        self._held[client] += 1
        self._num_held += 1
        return now_s

    def give_back(self, client: str, taken_s: float) -> None:
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
        """When as many places became free as are wanted before this one, as long as they were held lately."""
        num_wanted = 1 + sum(map(len, self._wishes.values()))
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(num_wanted * self._mean_held_s / self.num_places)))

    def _forget_wishes(self, now_s: float) -> None:
        for client, untils in tuple(self._wishes.items()):
            if left := [until_s for until_s in untils if until_s > now_s]:
                self._wishes[client] = left
            else:
                del self._wishes[client]
