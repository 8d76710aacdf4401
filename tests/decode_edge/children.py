"""The child processes of the test's process, by what they run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_running(module: str) -> list[int]:
    """Returns the ids of this process's living children whose command line has the name of this module."""
    found: list[int] = []
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found
