"""Tells the services of one application where the others listen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ANNOUNCEMENT_INTERVAL_S = 1.0
EXCHANGE_TIMEOUT_S = 5.0
"""How long a service waits for the directory's answer."""
SETTLING_S = EXCHANGE_TIMEOUT_S + ANNOUNCEMENT_INTERVAL_S + 1.0
"""How long a new directory lists nobody: until every service has given up the question that it asked the one before,
and has announced itself here. A list that lacks some services would take them away from their callers.
"""
EXPIRY_S = 10.0
"""How long a service stays listed after it last announced itself."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A service tells the directory its `role`, the `name` of its replica, and the "HOST:PORT" that it listens on."""

    role: str
    name: str
    address: str


class Directory:
    """Lists the services that have announced themselves within the last `EXPIRY_S`.

    Services announce themselves every `ANNOUNCEMENT_INTERVAL_S`, so a directory that was started anew knows all of them
    after `SETTLING_S`. Until then it lists none, and callers keep those they found before.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._listed: dict[str, tuple[Announcement, float]] = {}

    def exchange(self, announcement: Announcement, wanted: str) -> tuple[str, ...]:
        """Lists the service, and returns the addresses of those whose role is `wanted`, in the order of their first
        announcements; none before `SETTLING_S`.
        """
        now_s = self._clock()
        self._listed[announcement.name] = (announcement, now_s)
        self._listed = {name: entry for name, entry in self._listed.items() if now_s - entry[1] < EXPIRY_S}
        if now_s - self._began_s < SETTLING_S:
            return ()
        return tuple(each.address for each, _ in self._listed.values() if each.role == wanted)
