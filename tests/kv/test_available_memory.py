"""Tests of the available host memory, read from a fake /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.host.memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A fake file system with 8 GiB available and no limit on any cgroup."""
    write(tmp_path / "proc/meminfo", f"MemFree: 2 kB\nMemAvailable:   {8 << 20} kB\nHugePages_Total: 0")
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group_v2(group: Path, *, limit: object, usage: int = GIB, high: object = "max", **statistics: int) -> None:
    write(group / "memory.max", limit)
    write(group / "memory.high", high)
    write(group / "memory.current", usage)
    write(group / "memory.stat", "\n".join(f"{name} {value}" for name, value in {"anon": 5, **statistics}.items()))


def test_it_is_the_systems_where_no_group_has_a_limit(root: Path) -> None:
    assert available_bytes(root) == 8 * GIB
    write(root / "proc/self/cgroup", "0::/a")
    group_v2(root / "sys/fs/cgroup/a", limit="max")
    assert available_bytes(root) == 8 * GIB


@pytest.mark.parametrize("limited", ["", "a", "a/b"])
def test_every_group_above_may_limit_it(root: Path, limited: str) -> None:
    write(root / "proc/self/cgroup", "0::/a/b")
    group_v2(root / "sys/fs/cgroup" / limited, limit=4 * GIB)
    assert available_bytes(root) == 3 * GIB


def test_what_caches_would_give_back_is_available(root: Path) -> None:
    """The page cache of weights that were just read also counts as available, although the system lists it as
    active.
    """
    write(root / "proc/self/cgroup", "0::/a")
    caches = {"inactive_file": GIB // 2, "active_file": GIB, "slab_reclaimable": 3}
    group_v2(root / "sys/fs/cgroup/a", limit=4 * GIB, usage=3 * GIB, slab_unreclaimable=9, **caches)
    assert available_bytes(root) == 2 * GIB + GIB // 2 + 3


def test_where_a_group_is_slowed_down_it_has_its_limit(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a")
    group_v2(root / "sys/fs/cgroup/a", limit=4 * GIB, high=2 * GIB)
    assert available_bytes(root) == GIB


def test_a_group_beside_does_not(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a")
    group_v2(root / "sys/fs/cgroup/b", limit=2 * GIB)
    assert available_bytes(root) == 8 * GIB


def test_a_group_that_has_more_than_its_limit_leaves_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a")
    group_v2(root / "sys/fs/cgroup/a", limit=GIB, usage=2 * GIB)
    assert available_bytes(root) == 0


@pytest.mark.parametrize("limited", ["", "docker/1"])
def test_the_first_version_of_groups_is_known(root: Path, limited: str) -> None:
    write(root / "proc/self/cgroup", "9:cpu,cpuacct:/other\n4:memory:/docker/1\n0::/")
    group = root / "sys/fs/cgroup/memory" / limited
    write(group / "memory.limit_in_bytes", 3 * GIB)
    write(group / "memory.usage_in_bytes", GIB)
    write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 2}\ntotal_active_file 8")
    assert available_bytes(root) == 2 * GIB + GIB // 2 + 8


def test_a_system_that_says_nothing_has_no_figure(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
