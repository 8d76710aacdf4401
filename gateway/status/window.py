"""What one service exposed during the last while."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gateway.status.exposition import Exposition
from gateway.status.increase import Increase


@dataclass(frozen=True, slots=True)
class Step:
    """Between two samples that follow each other."""

    from_s: float
    to_s: float
    increase: Increase


class SampleWindow:
    """Samples of the last `window_s` seconds, oldest first."""

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._latest: tuple[float, Exposition] | None = None
        self._steps: deque[Step] = deque()

    @property
    def latest(self) -> Exposition | None:
        return None if self._latest is None else self._latest[1]

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._steps)

    @property
    def first_s(self) -> float | None:
        """When the oldest sample was taken."""
        if self._steps:
            return self._steps[0].from_s
        return None if self._latest is None else self._latest[0]

    def add(self, now_s: float, exposition: Exposition) -> None:
        if self._latest is not None:
            at_s, earlier = self._latest
            self._steps.append(Step(at_s, now_s, Increase.between(earlier, exposition)))
        self._latest = now_s, exposition

    def forget(self, now_s: float) -> None:
        """Drop what is older than the window."""
        while self._steps and self._steps[0].from_s < now_s - self._window_s:
            self._steps.popleft()

    def increase(self) -> Increase:
        """Over the whole window."""
        return Increase.sum(step.increase for step in self._steps)
