"""How many cores this process has."""

from __future__ import annotations

import os
from pathlib import Path

from common.host.control_groups import ControlGroup, groups_of


def num_cores(root: Path = Path("/")) -> int:
    """Whole ones that its affinity and its control groups' quotas allow, one at least.

    A quota, such as a container's, is time of any core: threads that are more than it pays for are all stopped once it
    is used up, those that others wait for too.
    """
    quotas = [quota for group in groups_of("cpu", root) if (quota := _quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _quota(group: ControlGroup) -> float | None:
    """In cores; None without one."""
    try:
        if group.is_v2:
            quota, period = (group.directory / "cpu.max").read_text().split()
        else:
            quota, period = ((group.directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = int(quota) / int(period)  # "max" or -1 where there is none
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None
