"""What host memory this process may still take.

Linux promises memory that it does not have, and ends the process that touches too much: so whoever is to touch a lot
asks first.
"""

from __future__ import annotations

import errno
from pathlib import Path

from common.host.control_groups import ControlGroup, groups_of

_V1_LIMITS, _V1_USAGE = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
_V1_RECLAIMABLE = ("total_inactive_file", "total_active_file")
_V2_LIMITS, _V2_USAGE = ("memory.max", "memory.high"), "memory.current"
_V2_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Names in memory.stat: files' caches, among them weights that were read or are mapped."""


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
