"""What host memory this process may still take.

Linux promises memory that it does not have, and ends the process that touches too much: so whoever is to touch a lot
asks first.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Files:
    """Of a control group: below `directory`, its limit, what it has, and of its statistics what it would give back."""

    directory: str
    limit: str
    usage: str
    reclaimable: str


_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def require_room(num_bytes: int) -> None:
    """Raises OSError when the system has less, as far as it says."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise OSError(errno.ENOMEM, f"{available / 2**30:,.1f} GiB of memory are available")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Without swapping: what the system has left, or this process's control groups, with what files' caches would give
    back. None where the system does not say.
    """
    rooms = [room for room in (_system_room(root), *_group_rooms(root)) if room is not None]
    return max(0, min(rooms)) if rooms else None


def _system_room(root: Path) -> int | None:
    kib = _numbers(root / "proc/meminfo").get("MemAvailable:")
    return None if kib is None else kib << 10


def _group_rooms(root: Path) -> Iterator[int | None]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        top = root / files.directory
        group = top / path.lstrip("/")
        for each in (group, *group.parents):
            yield _room(each, files)  # in a container the path may be the host's, and its own group the top
            if each == top:
                break


def _room(group: Path, files: _Files) -> int | None:
    try:
        limit, usage = (int((group / name).read_text()) for name in (files.limit, files.usage))
    except (OSError, ValueError):  # no such group or no limit
        return None
    return limit - usage + _numbers(group / "memory.stat").get(files.reclaimable, 0)


def _numbers(path: Path) -> dict[str, int]:
    """By name, of lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {parts[0]: int(parts[1]) for parts in map(str.split, lines) if len(parts) > 1 and parts[1].isdecimal()}
