"""File descriptors: a process raises its limit, and takes fewer connections than there are descriptors.

At the limit nothing can be opened any more: no connection, no file, no way to another service.
"""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 8192
_WANTED = 65_536
_OF_THE_PROCESS = 256
"""What it opens itself: its files, its own connections, the event loop's."""


def raise_descriptor_limit() -> None:
    """To what the system lets this process have. To be called once, in `main`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections(wanted: int = MAX_CONNECTIONS) -> int:
    """How many of those that are wanted leave descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(soft // 2, soft - _OF_THE_PROCESS))
