"""The child processes of the test's process, by what they run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_running(module: str) -> list[int]:
    """Returns the ids of this process's living children whose command line has the name of this module."""
    found: list[int] = []
    children: list[str] = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            children += (thread / "children").read_text().split()
    for pid in children:
        with suppress(OSError):
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found
