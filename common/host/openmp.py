"""How torch's CPU threads behave beside others: each service is one process of several on the same cores.

libgomp's threads wait for each other at the end of each operation, some 200 times a decode step: spinning first, then
asleep. Its defaults harm: spinning for milliseconds takes the core from the other service, and a process that has more
OpenMP threads than cores goes to sleep at once, every time.
"""

from __future__ import annotations

import os

from common.host.num_cores import num_cores

_SPINS = 10_000  # tens of microseconds: longer than what lies between two operations of a forward


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
