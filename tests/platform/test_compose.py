"""The compose files: the same pair on GPUs and on CPUs, reachable from this host only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import load_settings
from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings

ROOT = Path(__file__).parents[2]
FILES = ("compose.yaml", "compose.cpu.yaml")


def services(name: str) -> dict[str, dict[str, Any]]:
    document: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    found: dict[str, dict[str, Any]] = document["services"]
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_pair_runs_as_two_services(name: str) -> None:
    commands = {service: definition["command"] for service, definition in services(name).items()}
    assert commands == {
        "prefill": ["python", "-m", "prefill_service"],
        "decode": ["python", "-m", "decode_service"],
    }


@pytest.mark.parametrize("name", FILES)
def test_ports_are_published_on_the_hosts_loopback_only(name: str) -> None:
    ports = [port for definition in services(name).values() for port in definition["ports"]]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", FILES)
def test_the_decode_service_finds_the_prefill_service_where_it_listens(name: str) -> None:
    prefill, decode = services(name)["prefill"], services(name)["decode"]
    _, port = prefill["environment"]["BATON_LISTEN"].split(":")
    assert decode["environment"]["BATON_PREFILL"] == f"prefill:{port}"


def test_each_service_takes_the_gpu_that_its_variable_names() -> None:
    devices = {
        service: definition["deploy"]["resources"]["reservations"]["devices"]
        for service, definition in services("compose.yaml").items()
    }
    assert devices == {
        "prefill": [{"driver": "nvidia", "device_ids": ["${PREFILL_GPU:-0}"], "capabilities": ["gpu"]}],
        "decode": [{"driver": "nvidia", "device_ids": ["${DECODE_GPU:-1}"], "capabilities": ["gpu"]}],
    }


def test_the_cpu_pair_differs_in_image_and_device_only() -> None:
    gpu, cpu = services("compose.yaml"), services("compose.cpu.yaml")
    for service in ("prefill", "decode"):
        del gpu[service]["deploy"]
        for definition, device, image in ((gpu, "cuda", "baton-serve"), (cpu, "cpu", "baton-serve:cpu")):
            assert definition[service].pop("image") == image
            assert definition[service]["environment"].pop("BATON_DEVICE") == device
    assert gpu == cpu


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("service", "kind"), [("prefill", PrefillSettings), ("decode", DecodeSettings)])
def test_the_services_accept_the_environment_they_get(
    monkeypatch: pytest.MonkeyPatch, name: str, service: str, kind: type[ServiceSettings]
) -> None:
    for key, value in services(name)[service]["environment"].items():
        monkeypatch.setenv(key, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
    settings = load_settings(kind, [], program=service)
    assert settings.listen == "0.0.0.0:50051"
    assert settings.model == "demo"
    assert settings.device == ("cuda" if name == "compose.yaml" else "cpu")
