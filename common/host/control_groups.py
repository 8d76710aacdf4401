"""Finds this process's Linux control groups, whose files hold the limits of a container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group: the directory of its files, and whether it is one of cgroup version 2."""

    directory: Path
    is_v2: bool


def groups_of(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yields the control groups that may limit this process: its own, then each parent up to the top.

    `controller` is the resource, such as "memory". The directories may not exist: in a container, Linux may report
    the path that the group has on the host, while the top directory shows the container's own group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            yield ControlGroup(directory, is_v2=not controllers)
            if directory == top:
                break
