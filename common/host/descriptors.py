"""Raises the process's limit of file descriptors, and limits its connections so that some descriptors stay free.

At the limit a process can open nothing any more: no connection, no file.
"""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 8192
_WANTED = 65_536
_OF_THE_PROCESS = 256
"""Descriptors that the process needs besides callers' connections: for files, the event loop, its own connections."""


def raise_descriptor_limit() -> None:
    """Raises the soft limit of file descriptors to 65 536, or as far as the hard limit allows. Call once, in `main`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections(wanted: int = MAX_CONNECTIONS) -> int:
    """Returns how many connections to accept: `wanted`, or fewer, so that descriptors remain for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(soft // 2, soft - _OF_THE_PROCESS))
