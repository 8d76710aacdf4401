"""Tests that the compose files define the same services for GPUs and CPUs, without special rights and reachable from
this host only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from baton.cli.main import app
from common.config.gateway_settings import GatewaySettings
from common.config.load import load_settings
from common.config.process_settings import ProcessSettings
from common.config.settings import DecodeSettings, PrefillSettings
from common.kv.shared_pool import DIRECTORY

ROOT = Path(__file__).parents[2]
PAIR = ("compose.yaml", "compose.cpu.yaml")
PREFILL_HOST, DECODE_HOST = "deploy/two-hosts/prefill/compose.yaml", "deploy/two-hosts/decode/compose.yaml"
FILES = (*PAIR, PREFILL_HOST, DECODE_HOST)
OURS = ("prefill", "decode", "gateway")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)\}")


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return found


def services(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = document(name)["services"]
    return found


def our_services(name: str) -> dict[str, dict[str, Any]]:
    return {service: definition for service, definition in services(name).items() if "build" in definition}


def filled(value: str, **variables: str) -> str:
    return VARIABLE.sub(lambda found: variables.get(found[1], found[2] or ""), value)


def devices(name: str) -> dict[str, Any]:
    return {
        service: definition["deploy"]["resources"]["reservations"]["devices"]
        for service, definition in services(name).items()
        if "deploy" in definition
    }


@pytest.mark.parametrize("name", PAIR)
def test_what_is_run(name: str) -> None:
    always = {service for service, definition in services(name).items() if "profiles" not in definition}
    assert always == {"prefill", "decode", "gateway", "prometheus", "grafana"}
    assert services(name)["collector"]["profiles"] == ["tracing"]


@pytest.mark.parametrize("name", FILES)
def test_each_service_is_the_image_of_its_name(name: str) -> None:
    targets = {service: definition["build"]["target"] for service, definition in our_services(name).items()}
    assert targets == {service: service.removesuffix("-2") for service in targets}
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(targets.values()) <= set(stages)


def test_images_run_their_service_as_the_first_process() -> None:
    """The commands use exec form, because a shell would not pass SIGTERM on."""
    commands = re.findall(r"^CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    modules = ("gateway", "prefill_service", "decode_service")
    assert commands == [f'["python", "-m", "{module}"]' for module in modules]


@pytest.mark.parametrize("name", PAIR)
def test_everything_is_published_on_the_hosts_loopback_and_the_gateway_alone_at_a_fixed_port(name: str) -> None:
    ports = {service: [filled(port) for port in d.get("ports", [])] for service, d in services(name).items()}
    assert ports["prefill"] == []
    assert ports["gateway"] == ["127.0.0.1:8000:8000"]
    others = [port for service, found in ports.items() if service != "gateway" for port in found]
    assert others
    assert all(port.startswith("127.0.0.1::") for port in others)


def test_of_two_hosts_only_the_prefill_service_is_reached_from_elsewhere() -> None:
    ports = [filled(port) for port in services(PREFILL_HOST)["prefill"]["ports"]]
    assert ports == ["0.0.0.0:50052:50051", "127.0.0.1::9100"]
    others = [filled(port) for definition in services(DECODE_HOST).values() for port in definition["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in others)


@pytest.mark.parametrize("name", FILES)
def test_a_container_has_no_rights_is_started_again_and_fills_no_disk_with_its_log(name: str) -> None:
    for definition in services(name).values():
        assert definition["read_only"] is True
        assert definition["tmpfs"] == ["/tmp"]
        assert definition["cap_drop"] == ["ALL"]
        assert definition["security_opt"] == ["no-new-privileges:true"]
        assert definition["restart"] == "unless-stopped"
        assert definition["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}


@pytest.mark.parametrize("name", FILES)
def test_compose_waits_longer_than_a_service_takes_to_drain(name: str) -> None:
    for definition in our_services(name).values():
        assert int(definition["stop_grace_period"].removesuffix("s")) > PrefillSettings().grace_period_s + 10


@pytest.mark.parametrize("name", PAIR)
def test_services_start_behind_the_health_of_those_they_need(name: str) -> None:
    needs = {service: definition.get("depends_on") for service, definition in our_services(name).items()}
    assert needs["prefill"] is None
    assert needs["decode"] == {"prefill": {"condition": "service_healthy"}}
    assert needs["gateway"] == {"decode": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", FILES)
def test_health_is_readiness(name: str) -> None:
    asked = {service: " ".join(d["healthcheck"]["test"]) for service, d in our_services(name).items()}
    for service, command in asked.items():
        expected = {"prefill": "baton.v1.Prefill", "decode": "baton.v1.Inference", "gateway": "/health"}
        assert expected[service.removesuffix("-2")] in command


@pytest.mark.parametrize("name", FILES)
def test_health_is_asked_in_words_that_the_command_line_knows(name: str) -> None:
    """Runs the health commands with `--help` added: nothing is sent, but unknown options are still refused."""
    asked = [definition["healthcheck"]["test"][1:] for definition in our_services(name).values()]
    asked = [arguments for program, *arguments in asked if program == "baton"]
    assert asked
    for arguments in asked:
        assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0


@pytest.mark.parametrize("name", PAIR)
def test_services_find_each_other_where_they_listen(name: str) -> None:
    prefill, decode, gateway = (services(name)[service]["environment"] for service in OURS)
    port = prefill["BATON_LISTEN"].split(":")[1]
    assert decode["BATON_PREFILL"] == f"dns:///prefill:{port}"
    assert gateway["BATON_DECODE"] == f"dns:///decode:{decode['BATON_LISTEN'].split(':')[1]}"
    metrics = prefill["BATON_METRICS_LISTEN"].split(":")[1]
    assert gateway["BATON_METRICS_TARGETS"] == f"prefill:{metrics},decode:{metrics}"


def test_each_gpu_service_takes_the_gpu_that_its_variable_names() -> None:
    def gpu(variable: str) -> list[dict[str, Any]]:
        return [{"driver": "nvidia", "device_ids": [f"${{{variable}}}"], "capabilities": ["gpu"]}]

    assert devices("compose.yaml") == {
        "prefill": gpu("PREFILL_GPU:-0"),
        "decode": gpu("DECODE_GPU:-1"),
        "prefill-2": gpu("PREFILL_2_GPU:-2"),
        "decode-2": gpu("DECODE_2_GPU:-3"),
    }
    for host in ("prefill", "decode"):
        assert devices(f"deploy/two-hosts/{host}/gpu.yaml") == {host: gpu("GPU:-0")}


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_gpu_replica_differs_in_gpu_and_port_and_answers_to_the_same_name(service: str) -> None:
    first, second = services("compose.yaml")[service], services("compose.yaml")[f"{service}-2"]
    assert second.pop("profiles") == ["replicas"]
    assert second.pop("networks") == {"default": {"aliases": [service]}}
    for definition in (first, second):
        del definition["deploy"]
        definition.pop("ports", None)
    assert first == second


def test_services_on_cpus_share_the_memory_that_kv_pools_are_found_in_and_nobody_else_sees_it() -> None:
    """A pool's socket answers only processes of its own user, so no service may set another user. That user has no
    special rights.
    """
    name = "compose.cpu.yaml"
    on_it = {
        service: [volume for volume in definition.get("volumes", []) if volume.split(":")[1] == str(DIRECTORY)]
        for service, definition in services(name).items()
    }
    # Without nocopy, Docker would give the volume the owner and mode of the image's directory.
    assert {service: found for service, found in on_it.items() if found} == {
        service: [f"shm:{DIRECTORY}:nocopy"] for service in ("prefill", "decode")
    }
    volume = document(name)["volumes"]["shm"]["driver_opts"]
    assert (volume["type"], volume["device"]) == ("tmpfs", "tmpfs")
    assert {"mode=1777", "nosuid", "nodev", "noexec"} < set(volume["o"].split(","))
    assert not any({"user", "ipc", "shm_size"} & set(definition) for definition in our_services(name).values())


def test_the_cpu_file_differs_in_image_device_and_shared_memory_only() -> None:
    gpu, cpu = document("compose.yaml"), document("compose.cpu.yaml")
    del cpu["volumes"]["shm"]
    for service in ("prefill", "decode"):
        cpu["services"][service]["volumes"] = [
            volume for volume in cpu["services"][service]["volumes"] if not volume.startswith("shm:")
        ]
        del gpu["services"][f"{service}-2"]
        del gpu["services"][service]["deploy"]
        for file, device, tag in ((gpu, "cuda", "cuda"), (cpu, "cpu", "cpu")):
            definition = file["services"][service]
            assert filled(definition.pop("image")) == f"baton-{service}:{tag}"
            assert definition["environment"].pop("BATON_DEVICE") == device
    for file in (gpu, cpu):
        del file["x-environment"], file["x-build"]  # YAML has merged them into the services
        for definition in file["services"].values():
            if "build" in definition:
                definition["build"]["args"].pop("COMPILER_PACKAGES", None)  # only kernels on GPUs need it
    assert gpu == cpu


KINDS: dict[str, type[ProcessSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "gateway": GatewaySettings,
}


@pytest.mark.parametrize("name", FILES)
def test_the_services_accept_the_environment_they_get(name: str) -> None:
    for service, definition in our_services(name).items():
        with pytest.MonkeyPatch.context() as patch:
            for key, value in definition["environment"].items():
                patch.setenv(key, filled(value, PREFILL="prefill.example:50052"))
            settings = load_settings(KINDS[service.removesuffix("-2")], [], program=service)
        assert settings.listen.startswith("0.0.0.0:")


@pytest.mark.parametrize(
    ("variables", "head"),
    [
        ({}, "demo"),
        ({"BATON_DRAFT": "none"}, ""),
        ({"BATON_MODEL": "owner/name"}, ""),
        ({"BATON_MODEL": "owner/name", "BATON_DRAFT": "owner/head"}, "owner/head"),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_the_demo_model_speculates_as_it_is_and_another_by_one_variable(
    name: str, variables: dict[str, str], head: str
) -> None:
    for service in {"prefill", "decode"} & set(our_services(name)):
        with pytest.MonkeyPatch.context() as patch:
            for key, value in our_services(name)[service]["environment"].items():
                patch.setenv(key, filled(value, PREFILL="prefill.example:50052", **variables))
            settings = load_settings(PrefillSettings if service == "prefill" else DecodeSettings, [], program=service)
        assert settings.draft == head


@pytest.mark.parametrize(
    ("name", "max_short_prompt"), [("compose.yaml", 0), ("compose.cpu.yaml", 128), (DECODE_HOST, 0)]
)
def test_which_prompts_decode_computes_itself_is_its_default_or_set_by_variables(
    name: str, max_short_prompt: int
) -> None:
    def decides(**variables: str) -> tuple[int, bool]:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in services(name)["decode"]["environment"].items():
                patch.setenv(key, filled(value, PREFILL="prefill.example:50052", **variables))
            settings = load_settings(DecodeSettings, [], program="decode")
        return settings.max_short_prompt, settings.prefill_fallback

    assert decides() == (max_short_prompt, False)
    assert decides(BATON_LOCAL_PREFILL_TOKENS="7", BATON_PREFILL_FALLBACK="true") == (7, True)


@pytest.mark.parametrize("name", FILES)
def test_every_service_is_told_where_traces_go_and_how_many(name: str) -> None:
    for definition in our_services(name).values():
        environment = definition["environment"]
        assert environment["BATON_OTLP_ENDPOINT"] == "${BATON_OTLP_ENDPOINT:-}"
        assert environment["BATON_TRACE_SAMPLE_RATIO"] == "${BATON_TRACE_SAMPLE_RATIO:-1}"


@pytest.mark.parametrize("service", OURS)
def test_two_hosts_take_the_settings_that_one_host_takes(service: str) -> None:
    file = PREFILL_HOST if service == "prefill" else DECODE_HOST
    one, two = services("compose.yaml")[service]["environment"], services(file)[service]["environment"]
    # Addresses differ, and the device comes from the environment, so one file serves GPUs and CPUs.
    own = {"BATON_DEVICE", "BATON_PREFILL", "BATON_DECODE", "BATON_METRICS_TARGETS"}
    assert {key: two.get(key) for key in one if key not in own} == {key: one[key] for key in one if key not in own}


def test_between_two_hosts_both_ends_show_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = services(PREFILL_HOST)["prefill"]["environment"]
    decode = services(DECODE_HOST)["decode"]["environment"]
    assert prefill["BATON_TLS_CA"] == decode["BATON_PREFILL_TLS_CA"] == "/etc/baton/tls/ca.pem"
    assert decode["BATON_PREFILL_TLS"] == services(DECODE_HOST)["gateway"]["environment"]["BATON_DECODE_TLS"] == "true"
    for environment in (prefill, decode):
        assert environment["BATON_TLS_CERT"] and environment["BATON_TLS_KEY"]


@pytest.mark.parametrize("directory", [".", "deploy/two-hosts/prefill", "deploy/two-hosts/decode"])
def test_every_variable_is_in_the_example_with_its_default(directory: str) -> None:
    example = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / directory / ".env.example").read_text(), re.MULTILINE))
    found: dict[str, set[str]] = {}
    for file in (ROOT / directory).glob("*.yaml"):
        for variable, default in VARIABLE.findall(file.read_text()):
            found.setdefault(variable, set()).add(default)
    assert set(example) - {"COMPOSE_FILE"} == set(found)
    # The two files have their own images, and settings that must be given have no default.
    differing = {"PREFILL_IMAGE", "DECODE_IMAGE"} if directory == "." else {"PREFILL"}
    for variable in set(found) - differing:
        assert found[variable] == {example[variable]}, variable
