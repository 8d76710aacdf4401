"""How many threads compute, and how long they spin."""

from __future__ import annotations

import os

import pytest

from common.openmp import num_compute_threads, spin_briefly


@pytest.mark.parametrize(
    ("wanted", "share", "cores", "expected"), [(0, 1.0, 4, 4), (0, 0.5, 5, 2), (0, 0.5, 1, 1), (3, 0.5, 2, 3)]
)
def test_zero_threads_are_a_share_of_the_cores(
    wanted: int, share: float, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert num_compute_threads(wanted, share) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
    ids=str,
)
def test_what_the_environment_says_stays(
    before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    spin_briefly()
    assert {name: os.environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ} == after
