"""The order in which requests are served: by their priority, and by how long they have waited.

Every queue uses this one order: the decode service's waiting requests, the requests that it retracts, and the prompts
of the prefill service.

    priority 3, waits ──10 s──▶ as good as 2 ──10 s──▶ as good as 1 ──10 s──▶ as good as 0       (step_s = 10)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WORST_PRIORITY = 100
"""The largest priority, which is served last. The best one is a setting."""


@dataclass(frozen=True, slots=True)
class Ageing:
    """How priorities change with the time that requests wait.

    A lower priority is served earlier, as in vLLM; 0 is the default. Waiting makes a request's priority better by one
    for every `step_s` seconds, so a request of priority p is overtaken only by requests that come in the (p - q) *
    `step_s` seconds after it, where q is their priority.
    """

    step_s: float

    def due_s(self, priority: int, arrived_s: float) -> float:
        """Returns when a request is due, by the clock of `arrived_s`. Of two that wait, the one that is due first is
        served first.
        """
        return arrived_s + priority * self.step_s

    def level(self, due_s: float, *, now_s: float, best: int) -> int:
        """Returns the priority that waiting has made of that of a request which is due at `due_s`. Waiting does not
        make it better than `best`.
        """
        return max(best, math.ceil((due_s - now_s) / self.step_s))


DEFAULT_AGEING = Ageing(step_s=10.0)
