"""The files that the test's process has open."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def open_files() -> set[str]:
    """Returns the names of open files, sockets and pipes. Other threads may close some of theirs meanwhile, so compare
    with what was open before by `<=`.
    """
    opened = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            opened.add(str(entry.readlink()))
    return opened
