"""A name service whose every answer the test gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from common.addresses import address_of
from tests.handoff.scripted_prefill import BOUND_S


class ScriptedNames:
    """A LookUp. `hosts` has what is behind each name; a name that is not there is not known."""

    def __init__(self, **hosts: Sequence[str]) -> None:
        self.hosts: dict[str, Sequence[str]] = dict(hosts)
        self.num_look_ups = 0
        self.num_under_way = 0
        self.most_under_way = 0
        self.is_loop_thread = False
        self._changed = threading.Condition()
        self._is_held = False

    def __call__(self, host: str, port: int) -> tuple[str, ...]:
        with self._changed:
            self.is_loop_thread |= threading.current_thread().name == "loop"
            self.num_under_way += 1
            self.most_under_way = max(self.most_under_way, self.num_under_way)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_held, BOUND_S)
            self.num_under_way -= 1
            self.num_look_ups += 1
            self._changed.notify_all()
            if host not in self.hosts:
                raise OSError("the script does not know it")
            return tuple(address_of(number, port) for number in self.hosts[host])

    def hold(self) -> None:
        """Look-ups begin and do not end, until `release`."""
        with self._changed:
            self._is_held = True

    def release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def wait_for_one_under_way(self) -> None:
        self._wait(lambda: self.num_under_way > 0)

    def wait_for_none_under_way(self) -> None:
        self._wait(lambda: self.num_under_way == 0)

    def wait_for_more(self) -> None:
        """Return once a look-up that begins after this call has ended, and what it found was taken."""
        wanted = self.num_look_ups + 3  # the first began before, and the third begins when the second was taken
        self._wait(lambda: self.num_look_ups >= wanted)

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, BOUND_S), "not looked up"
