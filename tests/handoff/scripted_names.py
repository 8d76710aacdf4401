"""A name service. The test sets its answers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from common.addresses import address_of
from tests.handoff.scripted_prefill import BOUND_S


class ScriptedNames:
    """A look-up function for names. `hosts` maps each name to its hosts; other names are unknown."""

    def __init__(self) -> None:
        self.hosts: dict[str, Sequence[str]] = {}
        self.most_under_way = 0
        """The most look-ups of one name that ran at the same time."""
        self.is_loop_thread = False
        self._num_ended = 0
        self._under_way: Counter[str] = Counter()
        self._held: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, host: str, port: int) -> tuple[str, ...]:
        with self._changed:
            self.is_loop_thread |= threading.current_thread().name == "loop"
            self._under_way[host] += 1
            self.most_under_way = max(self.most_under_way, self._under_way[host])
            self._changed.notify_all()
            self._changed.wait_for(lambda: host not in self._held, BOUND_S)
            self._under_way[host] -= 1
            self._num_ended += 1
            self._changed.notify_all()
            if host not in self.hosts:
                raise OSError("the script does not know it")
            return tuple(address_of(number, port) for number in self.hosts[host])

    def hold(self, host: str) -> None:
        """Lets look-ups of this host start but not end, until `release`."""
        with self._changed:
            self._held.add(host)

    def release(self) -> None:
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    def wait_for_none_under_way(self) -> None:
        self._wait(lambda: self._under_way.total() == 0)

    def wait_for_more(self, num_further: int = 0) -> None:
        """Waits until a look-up that began after this call has ended and its result was taken, and then for
        `num_further` look-ups more. Only one name may be looked up.
        """
        wanted = self._num_ended + 3 + num_further  # the first began before; the third begins after the second is taken
        self._wait(lambda: self._num_ended >= wanted)

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, BOUND_S), "not looked up"
