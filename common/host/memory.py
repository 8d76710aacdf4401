"""Host memory: what this process may still take, and that it keeps what it had.

Linux promises memory that it does not have, and ends the process that touches too much: so whoever is to touch a lot
asks first.
"""

from __future__ import annotations

import ctypes
import errno
import sys
from pathlib import Path

from common.host.control_groups import ControlGroup, groups_of

_V1_LIMITS, _V1_USAGE = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
_V1_RECLAIMABLE = ("total_inactive_file", "total_active_file")
_V2_LIMITS, _V2_USAGE = ("memory.max", "memory.high"), "memory.current"
_V2_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Names in memory.stat: files' caches, among them weights that were read or are mapped."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST_THRESHOLD_BYTES = 32 << 20  # beyond it glibc refuses
_KEPT_BYTES = 512 << 20


def require_room(num_bytes: int) -> None:
    """Raises OSError when the system has less, as far as it says."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        needed, there = (f"{number / 2**30:,.1f} GiB" for number in (num_bytes, available))
        raise OSError(errno.ENOMEM, f"{needed} are needed and {there} of memory are available")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Without swapping: what the system has left, or this process's control groups, with what files' caches would give
    back. None where the system does not say.
    """
    kib = _numbers(root / "proc/meminfo").get("MemAvailable:")
    rooms = [] if kib is None else [kib << 10]
    for group in groups_of("memory", root):
        rooms += _rooms(group)
    return max(0, min(rooms)) if rooms else None


def _rooms(group: ControlGroup) -> list[int]:
    """By each limit of the group."""
    limits, usage, reclaimable = (
        (_V2_LIMITS, _V2_USAGE, _V2_RECLAIMABLE) if group.is_v2 else (_V1_LIMITS, _V1_USAGE, _V1_RECLAIMABLE)
    )
    used = _number(group.directory / usage)
    bounds = [bound for name in limits if (bound := _number(group.directory / name)) is not None]
    if used is None or not bounds:
        return []
    statistics = _numbers(group.directory / "memory.stat")
    return [bound - used + sum(statistics.get(name, 0) for name in reclaimable) for bound in bounds]


def _number(path: Path) -> int | None:
    """None where there is no such file, or no number in it, as where there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """By name, of lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {parts[0]: int(parts[1]) for parts in map(str.split, lines) if len(parts) > 1 and parts[1].isdecimal()}


def keep_freed_memory() -> None:
    """Memory that is freed stays with the process: KV segments come and go by the hundred each second.

    The C library would return each segment's 8 MiB to the system and ask for them again, page by page: half the time
    of sending over gRPC. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
