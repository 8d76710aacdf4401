"""The control groups that Linux has this process in: where a container's limits stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """`is_v2`: whether its files are those of the second version."""

    directory: Path
    is_v2: bool


def groups_of(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Of `controller`, such as "memory": this process's own and all above, each of which may limit it. They need not be
    there: in a container the path may be the host's, and the container's own group be the top.
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
