"""Keeps the samples of one service that were taken within a time window."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gateway.status.exposition import Exposition
from gateway.status.increase import Increase


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval between two successive samples.

    `before` is the growth of the counters from the first sample ever taken to the interval's start, and `after` the
    growth from that sample to the interval's end.
    """

    from_s: float
    to_s: float
    before: Increase
    after: Increase

    def rate(self, name: str) -> float:
        return (self.after.total(name) - self.before.total(name)) / (self.to_s - self.from_s)


class SampleWindow:
    """The samples of the last `window_s` seconds, oldest first."""

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._latest: tuple[float, Exposition] | None = None
        self._counted = Increase({})
        self._steps: deque[Interval] = deque()

    @property
    def latest(self) -> Exposition | None:
        return None if self._latest is None else self._latest[1]

    @property
    def steps(self) -> tuple[Interval, ...]:
        return tuple(self._steps)

    @property
    def first_s(self) -> float | None:
        """The time of the oldest sample, or None if there is none."""
        if self._steps:
            return self._steps[0].from_s
        return None if self._latest is None else self._latest[0]

    def add(self, now_s: float, exposition: Exposition) -> None:
        if self._latest is not None:
            at_s, earlier = self._latest
            before = self._counted
            self._counted = Increase.sum([before, Increase.between(earlier, exposition)])
            self._steps.append(Interval(at_s, now_s, before, self._counted))
        self._latest = now_s, exposition

    def forget(self, now_s: float) -> None:
        """Drops samples that are older than the window, but never the latest one."""
        while self._steps and self._steps[0].from_s < now_s - self._window_s:
            self._steps.popleft()

    def increase(self) -> Increase:
        """Returns the growth of counters over the whole window."""
        return self._steps[-1].after.since(self._steps[0].before) if self._steps else Increase({})
