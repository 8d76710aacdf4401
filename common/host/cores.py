"""The cores that this process has, and how its threads share them with others.

**OpenMP.** Each service is one process of several on the same cores. libgomp's threads wait for each other at the end
of each operation, some 200 times a decode step: spinning first, then asleep. Its defaults harm: spinning for
milliseconds takes the core from the other service, and a process that has more OpenMP threads than cores goes to sleep
at once, every time.

**Scheduling.** Who computes a forward on a CPU is not interrupted in the middle of it by the rest of its service.
Threads that compute one forward wait for each other some hundred times: whoever takes the core of one of them holds up
all. By Linux's policy for batches a thread that wakes takes no core from another: it waits until the other offers it,
which computing threads do where nobody waits for them, or until its slice is over, a few milliseconds at most. Threads
and processes inherit the policy. Where the service was started with another than the system's own it stays.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from common.host.control_groups import ControlGroup, groups_of

_SPINS = 10_000  # tens of microseconds: longer than what lies between two operations of a forward
_SWITCH_INTERVAL_S = 0.0005  # Python's own, 0.005, is as long as a kernel may take whose thread then waits
_ours: set[str] = set()
"""Whether this process's threads wait by what it was told itself."""


def num_cores(root: Path = Path("/")) -> int:
    """Whole ones that its affinity and its control groups' quotas allow, one at least.

    A quota, such as a container's, is time of any core: threads that are more than it pays for are all stopped once it
    is used up, those that others wait for too.
    """
    quotas = [quota for group in groups_of("cpu", root) if (quota := _quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _quota(group: ControlGroup) -> float | None:
    """In cores; None without one."""
    try:
        if group.is_v2:
            quota, period = (group.directory / "cpu.max").read_text().split()
        else:
            quota, period = ((group.directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = int(quota) / int(period)  # "max" or -1 where there is none
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def spin_briefly() -> None:
    """Before torch is imported. Leaves alone what the environment already says."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def set_own_num_threads(num_threads: int) -> None:
    """Give the calling thread its own number of intra-op threads, whatever other threads set before or later.

    torch initialises the number lazily, per thread, from the value that any thread set last, over what this thread has
    set by then. Asking first makes it initialise now.
    """
    import torch  # not before `spin_briefly`

    torch.get_num_threads()
    torch.set_num_threads(num_threads)


def num_compute_threads(num_wanted: int, share: float) -> int:
    """`num_wanted`, or for 0 that share of the cores which this process may use."""
    return num_wanted or max(1, int(num_cores() * share))


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
