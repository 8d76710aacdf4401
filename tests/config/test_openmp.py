"""Tests of the number of threads that compute, and of how long they spin (wait without sleeping)."""

from __future__ import annotations

import os

import pytest

from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings
from common.errors import StartupError
from common.host import cores
from common.host.cores import num_compute_threads, spin_briefly
from common.service import runtime
from common.service.process import Serve, run_service
from common.service.program import EXIT_STARTUP
from common.telemetry.timeline import Timeline


@pytest.mark.parametrize(
    ("wanted", "share", "num_cores", "expected"), [(0, 1.0, 4, 4), (0, 0.5, 5, 2), (0, 0.5, 1, 1), (3, 0.5, 2, 3)]
)
def test_zero_threads_are_a_share_of_the_cores(
    wanted: int, share: float, num_cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: num_cores)
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


@pytest.mark.parametrize(("kind", "expected"), [(PrefillSettings, 3), (DecodeSettings, 6)])
def test_each_service_takes_its_share(
    kind: type[ServiceSettings], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def open_device(name: str, *, num_threads: int, timeline: Timeline) -> None:
        seen.append(num_threads)
        raise StartupError("far enough")

    monkeypatch.setattr(cores, "num_cores", lambda: 6)
    monkeypatch.setattr(runtime, "open_device", open_device)
    with pytest.raises(StartupError):
        runtime.open_runtime(kind())
    assert seen == [expected]


def test_a_service_spins_briefly_before_it_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    seen: list[str | None] = []

    def import_serve() -> Serve[DecodeSettings]:
        seen.append(os.environ.get("GOMP_SPINCOUNT"))
        raise StartupError("far enough")

    assert run_service("decode_service", DecodeSettings, import_serve, []) == EXIT_STARTUP
    assert seen == ["10000"]
