"""Decides at each visit of a named point whether a fault happens there."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable

from tests.faults.plan import Action, Fault, FaultPlan


class InjectedFault(Exception):
    """Raised by a piece (unit of stream work) when the plan says so."""


class Injector:
    """Injects the faults of a plan. Any thread may visit a point. Whether a visit is hit depends on the plan, its seed,
    the point and the visit's number.

    `announce` is called with each fault just before it happens. `count` is called now and then with a point's number of
    new visits. The numbers given so far always add up to more than half of all visits.
    """

    def __init__(
        self,
        plan: FaultPlan,
        announce: Callable[[Fault, int], None] = lambda fault, visit: None,
        count: Callable[[str, int], None] = lambda point, num_visits: None,
    ) -> None:
        self._plan = plan
        self._announce = announce
        self._count = count
        self._lock = threading.Lock()
        self._num_visits: Counter[str] = Counter()
        self._num_hits: Counter[int] = Counter()

    def watches(self, point: str) -> bool:
        return any(fault.point == point for fault in self._plan.faults)

    def visit(self, point: str) -> Fault | None:
        """Returns the fault that happens at this visit, or None. If the fault kills the process, this does not
        return.
        """
        if not self.watches(point):
            return None
        with self._lock:
            self._num_visits[point] += 1
            visit = self._num_visits[point]
            fault = self._choose(point, visit)
        if visit.bit_count() == 1:  # a power of two: twice as many as at the last call
            self._count(point, visit - visit // 2)
        if fault is None:
            return None
        self._announce(fault, visit)
        if fault.action is Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        return fault

    def damage(self, fault: Fault, data: bytes) -> bytes:
        """Returns `data` truncated or with one wrong byte."""
        with self._lock:
            draw = random.Random(f"{self._plan.seed} {fault.point} {self._num_visits[fault.point]} damage")
        place = draw.randrange(len(data)) if data else 0
        if fault.action is Action.TRUNCATE:
            return data[:place]
        assert fault.action is Action.CORRUPT
        return data[:place] + bytes([data[place] ^ draw.randrange(1, 256)]) + data[place + 1 :] if data else b"\xff"

    def _choose(self, point: str, visit: int) -> Fault | None:
        for number, fault in enumerate(self._plan.faults):
            if fault.point != point or self._num_hits[number] == fault.at_most:
                continue
            draw = random.Random(f"{self._plan.seed} {number} {point} {visit}").random()
            if visit == fault.at if fault.at is not None else draw < fault.rate:
                self._num_hits[number] += 1
                return fault
        return None
