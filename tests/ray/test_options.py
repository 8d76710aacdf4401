"""Tests of Serve's options of each deployment, and of what a replica's resources mean for its service."""

from __future__ import annotations

import pytest

from baton.service_process import ProcessRole
from baton_ray.arguments import gateway_options, replica_flags, service_options, settings_of
from common.errors import ConfigError


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_service_has_the_time_to_drain_before_serve_kills_it(role: ProcessRole) -> None:
    options = service_options(settings_of(role, ["--grace-period-s=60"]))
    assert (options["name"], options["graceful_shutdown_timeout_s"]) == (role, 80.0)


def test_serve_gives_the_gateway_more_requests_than_it_takes_so_that_it_can_refuse_them() -> None:
    options = gateway_options(settings_of("gateway", ["--max-open-requests=100", "--grace-period-s=60"]))
    assert (options["max_ongoing_requests"], options["graceful_shutdown_timeout_s"]) == (200, 80.0)


@pytest.mark.parametrize(
    ("flags", "resources"),
    [
        ([], {"num_cpus": 1}),
        (["--device=cuda"], {"num_cpus": 1, "num_gpus": 1}),
        (["--device=cuda:0"], {"num_cpus": 1, "num_gpus": 1}),
        (["--tensor-parallel=2"], {"num_cpus": 2}),
        (["--tensor-parallel=2", "--device=cuda"], {"num_cpus": 2, "num_gpus": 2}),
    ],
)
def test_a_service_asks_for_what_it_computes_on(flags: list[str], resources: dict[str, float]) -> None:
    options = service_options(settings_of("decode", flags))
    assert options["ray_actor_options"] == resources
    bundle = {"CPU": 2} | ({"GPU": 2} if "num_gpus" in resources else {})
    assert options.get("placement_group_bundles") == ([bundle] if "--tensor-parallel=2" in flags else None)


@pytest.mark.parametrize(
    ("flags", "assigned", "expected"),
    [
        ([], {"CPU": 4.0}, ["--num-threads=4"]),
        ([], {"CPU": 0.5}, ["--num-threads=1"]),
        ([], {}, ["--num-threads=1"]),
        (["--num-threads=2"], {"CPU": 4.0}, []),
        (["--device=cuda"], {"CPU": 4.0, "GPU": 0.5}, ["--num-threads=4"]),
    ],
)
def test_a_service_computes_on_as_many_threads_as_its_replica_has_cpus(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], assigned: dict[str, float], expected: list[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert replica_flags(settings_of("decode", flags), assigned) == expected


@pytest.mark.parametrize(("num_ranks", "num_gpus"), [(1, 0), (2, 1)])
def test_a_gpu_is_not_taken_by_a_replica_that_asked_for_none(num_ranks: int, num_gpus: float) -> None:
    told = f"decode: device is cuda, tensor_parallel {num_ranks}, and the replica has {num_gpus} GPUs: set num_gpus"
    with pytest.raises(ConfigError, match=told):
        settings = settings_of("decode", ["--device=cuda", f"--tensor-parallel={num_ranks}"])
        replica_flags(settings, {"CPU": 4.0, "GPU": num_gpus})
