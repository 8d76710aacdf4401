"""Tests of the number of cores available to a process, read from a fake /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.host.cores import num_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
@pytest.mark.parametrize("limited", ["", "a", "a/b"], ids=["top", "above", "own"])
def test_a_quota_of_any_group_above_bounds_them(tmp_path: Path, limited: str, quota: str, expected: int) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/a/b")
    write(tmp_path / "sys/fs/cgroup" / limited / "cpu.max", quota)
    assert num_cores(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 8), (300000, 3)])
def test_the_first_version_of_groups_is_known(tmp_path: Path, quota: int, expected: int) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/other\n3:cpu,cpuacct:/docker/1\n0::/")
    group = tmp_path / "sys/fs/cgroup/cpu/docker/1"
    write(group / "cpu.cfs_quota_us", quota)
    write(group / "cpu.cfs_period_us", 100000)
    assert num_cores(tmp_path) == expected


def test_a_system_without_groups_gives_what_the_affinity_allows(tmp_path: Path) -> None:
    assert num_cores(tmp_path) == 8
