"""Counts the cores that this process may use, and sets how its threads share them.

**OpenMP.** Several services run on the same cores. libgomp's threads wait for each other at the end of each operation,
some 200 times per decode step: they spin first, then sleep. The defaults are bad here. Threads that spin for
milliseconds take the core from the other service. Threads of a process with more OpenMP threads than cores sleep at
once, every time.

**Scheduling.** The threads that compute a forward on a CPU should not be interrupted by the other threads of their
service. They wait for each other some hundred times per forward, so one that loses its core holds up all. Therefore the
other threads run with Linux's SCHED_BATCH policy. A thread with it does not take the core of another thread when it
wakes. It waits until that thread yields, as idle computing threads do, or until that thread's time slice ends, after a
few milliseconds at most. New threads and processes inherit the policy. If the service was started with a policy other
than the default, it keeps that.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from common.host.control_groups import ControlGroup, groups_of

_SPINS = 10_000  # tens of microseconds: longer than the time between two operations of a forward
_SWITCH_INTERVAL_S = 0.0005  # Python's default, 0.005, is as long as a whole kernel, whose thread then waits
ours: set[str] = set()
"""Not empty if this module, and not the service's starter, set SCHED_BATCH in this process."""


def num_cores(root: Path = Path("/")) -> int:
    """Returns how many whole cores this process may use by its CPU affinity and its control groups' quotas, at least 1.

    A quota, such as a container's, limits CPU time and not cores. With more threads than the quota allows, Linux stops
    all of them once the time is used up, including those that others wait for.
    """
    quotas = [quota for group in groups_of("cpu", root) if (quota := _quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _quota(group: ControlGroup) -> float | None:
    """Returns the group's CPU quota as a number of cores, or None if it has none."""
    try:
        if group.is_v2:
            quota, period = (group.directory / "cpu.max").read_text().split()
        else:
            quota, period = ((group.directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = int(quota) / int(period)  # "max" or -1 if there is no quota
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def spin_briefly() -> None:
    """Makes OpenMP threads spin only briefly before they sleep. Call it before torch is imported.

    Does nothing if the environment already sets OMP_WAIT_POLICY or GOMP_SPINCOUNT.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def set_own_num_threads(num_threads: int) -> None:
    """Sets the calling thread's number of intra-op threads, independently of other threads.

    torch initialises this number lazily in each thread, from the value that any thread set last, and so could overwrite
    the one set here. Reading the number first makes torch initialise it now.
    """
    import torch  # here, so that `spin_briefly` can run before the import

    torch.get_num_threads()
    torch.set_num_threads(num_threads)


def num_compute_threads(num_wanted: int, share: float) -> int:
    """Returns `num_wanted`, or if that is 0, the given share of the cores that this process may use (at least 1)."""
    return num_wanted or max(1, int(num_cores() * share))


def wait_for_computing() -> None:
    """Makes the calling thread, and threads that it starts later, yield to threads that compute (SCHED_BATCH).

    When they wake they wait for a free core, instead of taking the core of a computing thread.
    """
    if sys.platform == "linux" and _change(os.SCHED_OTHER, os.SCHED_BATCH):
        ours.add("waiting")


def compute() -> None:
    """Gives the calling thread, and threads that it starts later, the default scheduling policy. Forwards need that.

    Does nothing if `wait_for_computing` has not changed the policy in this process.
    """
    if sys.platform == "linux" and ours:
        _change(os.SCHED_BATCH, os.SCHED_OTHER)


def leave_service() -> None:
    """Gives the calling thread the default scheduling policy again, in a child process that inherited SCHED_BATCH.

    Does nothing under any other policy.
    """
    if sys.platform == "linux":
        _change(os.SCHED_BATCH, os.SCHED_OTHER)


def switch_threads_early() -> None:
    """Makes Python hand its global lock to a waiting thread after half a millisecond instead of five."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _change(before: int, after: int) -> bool:
    """Sets the calling thread's scheduling policy to `after` if it is `before`. Returns True if it did.

    A sandbox may forbid it, which only costs some speed.
    """
    with suppress(OSError):
        if os.sched_getscheduler(0) == before:
            os.sched_setscheduler(0, after, os.sched_param(0))
            return True
    return False
