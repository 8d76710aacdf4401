"""Who computes a forward on a CPU is not interrupted in the middle of it by the rest of its service.

Threads that compute one forward wait for each other some hundred times: whoever takes the core of one of them holds up
all. By Linux's policy for batches a thread that wakes takes no core from another: it waits until the other offers it,
which computing threads do where nobody waits for them, or until its slice is over, a few milliseconds at most.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def wait_for_computing() -> None:
    """The calling thread, and those that it begins later: they take a core that is offered."""
    if sys.platform == "linux":
        _set(os.SCHED_BATCH)


def compute() -> None:
    """The calling thread, and those that it begins later: as any other process's."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_BATCH:
        _set(os.SCHED_OTHER)


def _set(policy: int) -> None:
    with suppress(OSError):  # what a sandbox refuses, which costs some speed
        os.sched_setscheduler(0, policy, os.sched_param(0))
