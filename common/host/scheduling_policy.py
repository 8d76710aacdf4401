"""Who computes a forward on a CPU is not interrupted in the middle of it by the rest of its service.

Threads that compute one forward wait for each other some hundred times: whoever takes the core of one of them holds up
all. By Linux's policy for batches a thread that wakes takes no core from another: it waits until the other offers it,
which computing threads do where nobody waits for them, or until its slice is over, a few milliseconds at most.

Threads and processes inherit the policy. Where the service was started with another than the system's own it stays.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_SWITCH_INTERVAL_S = 0.0005  # Python's own, 0.005, is as long as a kernel may take whose thread then waits

_ours: set[str] = set()
"""Whether this process's threads wait by what it was told itself."""


def wait_for_computing() -> None:
    """The calling thread, and those that it begins later: they take a core that is offered."""
    if sys.platform == "linux" and _change(os.SCHED_OTHER, os.SCHED_BATCH):
        _ours.add("waiting")


def compute() -> None:
    """The calling thread, and those that it begins later: as any other process's."""
    if sys.platform == "linux" and _ours:
        _change(os.SCHED_BATCH, os.SCHED_OTHER)


def leave_service() -> None:
    """A process that the service began computes for itself, as any other: by the system's policy, not its service's."""
    if sys.platform == "linux":
        _change(os.SCHED_BATCH, os.SCHED_OTHER)


def switch_threads_early() -> None:
    """A thread that waits for the interpreter's lock gets it after half a millisecond."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _change(before: int, after: int) -> bool:
    """Of the calling thread, if it is `before`. A sandbox may refuse, which costs some speed."""
    with suppress(OSError):
        if os.sched_getscheduler(0) == before:
            os.sched_setscheduler(0, after, os.sched_param(0))
            return True
    return False
