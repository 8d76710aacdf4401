"""Host memory: measures and limits how much there is to use, and makes the process keep or return what it frees.

Linux lets a process allocate more memory than there is, and kills it when it uses too much. So code that needs much
memory checks first.
"""

from __future__ import annotations

import ctypes
import errno
import resource
import sys
from pathlib import Path

from common.host.control_groups import ControlGroup, groups_of

_V1_LIMITS, _V1_USAGE = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
_V1_RECLAIMABLE = ("total_inactive_file", "total_active_file")
_V2_LIMITS, _V2_USAGE = ("memory.max", "memory.high"), "memory.current"
_V2_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Names in memory.stat of memory that Linux can reclaim: caches of files, such as weights that were read or mapped."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h
_LARGEST_THRESHOLD_BYTES = 32 << 20  # glibc refuses more
_KEPT_BYTES = 512 << 20


def require_room(num_bytes: int) -> None:
    """Raises OSError if less than `num_bytes` of memory is available. Does nothing if that is not known."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        needed, there = (f"{number / 2**30:,.1f} GiB" for number in (num_bytes, available))
        raise OSError(errno.ENOMEM, f"{needed} are needed and {there} of memory are available")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process can still use without swapping, or None if that is not known.

    It is the least of what the system and each control group of this process have left. Memory that file caches hold
    counts as available.
    """
    kib = _numbers(root / "proc/meminfo").get("MemAvailable:")
    rooms = [] if kib is None else [kib << 10]
    for group in groups_of("memory", root):
        rooms += _rooms(group)
    return max(0, min(rooms)) if rooms else None


def own_bytes() -> tuple[int, int]:
    """Returns how many bytes this process has mapped, and how many of them it has in physical memory."""
    mapped, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(mapped) * resource.getpagesize(), int(resident) * resource.getpagesize()


def limit_own_memory(num_bytes: int) -> None:
    """Lets this process map at most `num_bytes` more than it has mapped already.

    What is mapped already is not limited, because its size depends on the system: locale files alone may take some
    hundred MiB.
    """
    mapped, _ = own_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes,) * 2)


def _rooms(group: ControlGroup) -> list[int]:
    """Returns the bytes that each limit of the group leaves; empty if it has no limit."""
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
    """Returns the number in a file, or None if the file does not exist or holds no number ("max": no limit)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Reads a file with a name and a number in each line, and returns the numbers by name. Empty without the file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {parts[0]: int(parts[1]) for parts in map(str.split, lines) if len(parts) > 1 and parts[1].isdecimal()}


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory for reuse, instead of returning it to the operating system.

    KV segments of up to 8 MiB are allocated and freed hundreds of times each second. Without this, half of the time of
    sending over gRPC would go into returning their memory and getting it again, page by page. Does nothing if the C
    library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Gives the memory that malloc keeps for reuse back to the operating system.

    Call it after much memory was freed that will not be needed again, as when weights are replaced by packed ones. Does
    nothing if the C library is not glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
