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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Caller = tuple[str, str]
"""Who wants something that is shared: a client, and the tenant for whom it asks, or ""."""
_LATE_S = 1.0
"""How many seconds late a refused client may ask again before its place is no longer kept."""
_MAX_WISHERS = 256
_MAX_RETRY_AFTER_S = 60
_NEW_SHARE = 0.1
KeyT = TypeVar("KeyT")


class Full(Exception):
    """There is no place for this client now. There may be one after `retry_after_s` seconds."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"no place for {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class HeldPlace:
    """A place of `FairPlaces` that `caller` has held since `since_s`, by the clock of the places."""

    caller: Caller
    since_s: float


class FairPlaces:
    """Gives places to callers. Call it from one thread only.

    A refused caller is told when to ask again. Until then, places that become free are kept for it, up to its share:
    from other clients an eighth of all places at most, for all refused callers together, and from its client's other
    tenants a sixteenth. The share is the same for every client that holds or wants places, and a client's tenants have
    equal parts of it. There are also an eighth more places than `num_places`, only for clients below their share.
    """

    def __init__(self, num_places: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_places = num_places
        self._num_extra = max(1, num_places // 8)
        self._clock = clock
        self._held: Counter[Caller] = Counter()
        self._held_by_client: Counter[str] = Counter()
        self._num_held = 0
        # For each refused request, until when a place is kept; earliest first
        self._wishes: dict[Caller, list[float]] = {}
        self._mean_held_s = 0.0

    def __len__(self) -> int:
        return self._num_held

    def take(self, caller: Caller) -> HeldPlace:
        """Takes a place for `caller`, to be passed to `give_back`. Raises Full."""
        now_s = self._clock()
        self._forget_wishes(now_s)
        may_take = self._may_take(caller)
        wishes = self._wishes.pop(caller, [])
        if wishes and (may_take or wishes[0] <= now_s + _LATE_S):  # the one that was to come by now has come
            del wishes[0]
        if wishes:
            self._wishes[caller] = wishes
        if not may_take:
            _, of_client, of_caller = self._shares(caller)
            retry_after_s = self._retry_after_s(of_client)
            insort(wishes, now_s + retry_after_s + _LATE_S)
            self._wishes[caller] = wishes[-of_caller:]
            if len(self._wishes) > _MAX_WISHERS:
                self._forget_one()
            raise Full(retry_after_s)
        self._hold(caller, 1)
        return HeldPlace(caller, now_s)

    def hand_over(self, place: HeldPlace, caller: Caller) -> HeldPlace:
        """Moves a place to `caller`, whom `take` has just refused. Returns it."""
        del self._wishes[caller][-1:]
        if not self._wishes[caller]:
            del self._wishes[caller]
        self._hold(caller, 1)
        self._hold(place.caller, -1)
        return HeldPlace(caller, self._clock())

    def give_back(self, place: HeldPlace) -> None:
        self._hold(place.caller, -1)
        held_s = self._clock() - place.since_s
        self._mean_held_s += (_NEW_SHARE if self._mean_held_s else 1.0) * (held_s - self._mean_held_s)

    def _hold(self, caller: Caller, num_more: int) -> None:
        client, _ = caller
        self._num_held += num_more
        self._held_by_client[client] += num_more
        self._held[caller] += num_more
        if not self._held[caller]:
            del self._held[caller]
        if not self._held_by_client[client]:
            del self._held_by_client[client]

    def _may_take(self, caller: Caller) -> bool:
        num_free = self.num_places - self._num_held
        if num_free > 0 and not self._wishes.keys() - {caller}:
            return True
        client, _ = caller
        num_clients, of_client, of_caller = self._shares(caller)
        is_client_below, is_below = self._held_by_client[client] < of_client, self._held[caller] < of_caller
        if num_free > 0:
            wished = {each: len(wishes) for each, wishes in self._wishes.items()}
            num_for_clients = num_for_tenants = 0  # kept for those that are below their share, if this one is not
            if not is_client_below:
                num_for_clients = _num_kept(_by_client(wished), self._held_by_client, of_client)
            if not is_below:
                siblings = {each: num for each, num in wished.items() if each[0] == client}
                num_for_tenants = _num_kept(siblings, self._held, of_caller)
            num_kept = min(num_for_clients, self._num_extra) + min(num_for_tenants, max(1, self._num_extra // 2))
            return num_free > num_kept
        part = max(1, self._num_extra // max(1, num_clients - 1))
        is_entitled = is_client_below and self._held_by_client[client] < part
        return num_clients > 1 and is_entitled and -num_free < self._num_extra

    def _shares(self, caller: Caller) -> tuple[int, int, int]:
        """Returns how many clients hold or want places, `caller`'s among them, and the shares of each client and of
        `caller`.
        """
        num_tenants = Counter(client for client, _ in self._held.keys() | self._wishes.keys() | {caller})
        of_client = max(1, self.num_places // len(num_tenants))
        return len(num_tenants), of_client, max(1, of_client // num_tenants[caller[0]])

    def _forget_one(self) -> None:
        """Forgets what one refused caller wants: the first of the client that has most of them."""
        ((client, _),) = Counter(name for name, _ in self._wishes).most_common(1)
        del self._wishes[next(each for each in self._wishes if each[0] == client)]

    def _retry_after_s(self, of_client: int) -> int:
        """Returns in about how many seconds enough places are free for all refused requests and this one. Each client's
        requests count up to its share.

        The estimate assumes that places are held as long as recent ones. It is at most `_MAX_RETRY_AFTER_S`.
        """
        wished = _by_client({each: len(wishes) for each, wishes in self._wishes.items()})
        num_wanted = 1 + sum(min(num, of_client) for num in wished.values())
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(num_wanted * self._mean_held_s / self.num_places)))

    def _forget_wishes(self, now_s: float) -> None:
        for caller, untils in tuple(self._wishes.items()):
            if left := [until_s for until_s in untils if until_s > now_s]:
                self._wishes[caller] = left
            else:
                del self._wishes[caller]


def _by_client(nums: Mapping[Caller, int]) -> Counter[str]:
    """Returns the numbers of each client's tenants, added up."""
    sums: Counter[str] = Counter()
    for (client, _), num in nums.items():
        sums[client] += num
    return sums


def _num_kept(wished: Mapping[KeyT, int], held: Counter[KeyT], share: int) -> int:
    """Returns how many of the places that are wanted are kept for those who hold less than their share."""
    return sum(min(num, max(0, share - held[each])) for each, num in wished.items())


class NoRoom(Exception):
    """The caller cannot have so many bytes now."""


class FairBytes:
    """Lends up to `max_bytes` to callers. Call it from one thread only.

    One client may hold at most half of them, and one tenant that it names at most a quarter. A request for more than
    that takes as much as may be held.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[Caller] = Counter()

    def take(self, caller: Caller, num_bytes: int) -> int:
        """Takes bytes for `caller`, and returns how many, to be passed to `give_back`. Raises NoRoom."""
        client, tenant = caller
        of_client = self._max_bytes // 2
        of_caller = of_client // 2 if tenant else of_client
        num_taken = min(num_bytes, of_caller)
        if (
            self._held[caller] + num_taken > of_caller
            or _by_client(self._held)[client] + num_taken > of_client
            or self._held.total() + num_taken > self._max_bytes
        ):
            raise NoRoom
        self._held[caller] += num_taken
        return num_taken

    def give_back(self, caller: Caller, num_taken: int) -> None:
        self._held[caller] -= num_taken
        if not self._held[caller]:
            del self._held[caller]
