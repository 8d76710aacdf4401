"""The compose files define the same services for GPUs and CPUs, without special rights, for this host only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from typer.testing import CliRunner

from baton.cli.main import app
from common.config.load import load_settings
from common.config.settings import DecodeSettings, GatewaySettings, PrefillSettings, ProcessSettings
from common.errors import ConfigError
from common.kv.shared_pool import DIRECTORY
from scripts.lint.problem import ROOT, Problem, set_apart, unequal

GPU, CPU = ROOT / "compose.yaml", ROOT / "compose.cpu.yaml"
PAIR = (GPU, CPU)
TWO_HOSTS = ROOT / "deploy/two-hosts"
PREFILL_HOST, DECODE_HOST = TWO_HOSTS / "prefill/compose.yaml", TWO_HOSTS / "decode/compose.yaml"
FILES = (*PAIR, PREFILL_HOST, DECODE_HOST)
DOCKERFILE = ROOT / "Dockerfile"
KINDS: dict[str, type[ProcessSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "gateway": GatewaySettings,
}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)\}")

Services = dict[str, dict[str, Any]]


# ---- images, rights and ports ---------------------------------------------------------------------------------------


def a_pair_is_run_with_what_watches_it() -> Iterator[Problem]:
    for file in PAIR:
        always = {service for service, definition in services(file).items() if "profiles" not in definition}
        yield from unequal(file, "run", always, {*KINDS, "prometheus", "grafana"})
        yield from unequal(file, "profiles", services(file)["collector"]["profiles"], ["tracing"])


def each_service_is_the_image_of_its_name() -> Iterator[Problem]:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE.read_text(), re.MULTILINE)
    for file in FILES:
        for service, definition in _ours(file).items():
            target = definition["build"]["target"]
            yield from unequal(file, f"target of {service}", target, service.removesuffix("-2"))
            yield from unequal(file, f"{target} is a stage", target in stages, True)


def images_run_their_service_as_the_first_process() -> Iterator[Problem]:
    """The commands use exec form, because a shell would not pass SIGTERM on."""
    commands = re.findall(r"^CMD (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    modules = ("gateway", "prefill_service", "decode_service")
    yield from unequal(DOCKERFILE, "commands", commands, [f'["python", "-m", "{module}"]' for module in modules])


def a_container_has_no_rights_starts_again_and_fills_no_disk_with_its_log() -> Iterator[Problem]:
    wanted = {
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}},
    }
    for file in FILES:
        for service, definition in services(file).items():
            yield from unequal(file, service, {key: definition.get(key) for key in wanted}, wanted)


def ports_are_published_on_the_hosts_loopback_and_the_gateways_alone_is_fixed() -> Iterator[Problem]:
    for file in PAIR:
        ports = {service: _ports(definition) for service, definition in services(file).items()}
        yield from unequal(file, "ports of prefill", ports.pop("prefill"), [])
        yield from unequal(file, "ports of the gateway", ports.pop("gateway"), ["127.0.0.1:8000:8000"])
        others = [port for of_service in ports.values() for port in of_service]
        yield from unequal(file, "ports", [port for port in others if port.startswith("127.0.0.1::")], others)
    prefill = _ports(services(PREFILL_HOST)["prefill"])
    yield from unequal(PREFILL_HOST, "ports", prefill, ["0.0.0.0:50052:50051", "127.0.0.1::9100"])
    others = [port for definition in services(DECODE_HOST).values() for port in _ports(definition)]
    yield from unequal(DECODE_HOST, "ports", [port for port in others if port.startswith("127.0.0.1:")], others)


# ---- start and health -----------------------------------------------------------------------------------------------


def services_start_after_those_they_need_are_healthy() -> Iterator[Problem]:
    for file in PAIR:
        for service, needs in (("prefill", None), ("decode", "prefill"), ("gateway", "decode")):
            wanted = {needs: {"condition": "service_healthy"}} if needs else None
            yield from unequal(file, f"needs of {service}", services(file)[service].get("depends_on"), wanted)


def compose_waits_longer_than_a_service_takes_to_drain() -> Iterator[Problem]:
    for file in FILES:
        for service, definition in _ours(file).items():
            waits_s = int(definition["stop_grace_period"].removesuffix("s"))
            if waits_s <= PrefillSettings().grace_period_s + 10:
                yield Problem(file, 0, f"{service} is killed after {waits_s} s, while it may drain")


def health_is_readiness_asked_in_words_that_the_command_line_knows() -> Iterator[Problem]:
    """Runs the health commands with `--help` added: nothing is sent, but unknown options are still refused."""
    asks_for = {"prefill": "baton.v1.Prefill", "decode": "baton.v1.Inference", "gateway": "/health"}
    for file in FILES:
        for service, definition in _ours(file).items():
            _, program, *arguments = definition["healthcheck"]["test"]
            if asks_for[service.removesuffix("-2")] not in " ".join(arguments):
                yield Problem(file, 0, f"the health check of {service} does not ask for readiness")
            if program == "baton" and CliRunner().invoke(app, [*arguments, "--help"]).exit_code != 0:
                yield Problem(file, 0, f"the health check of {service} is refused by the command line")


def services_find_each_other_where_they_listen() -> Iterator[Problem]:
    for file in PAIR:
        prefill, decode, gateway = (services(file)[service]["environment"] for service in KINDS)
        port, decodes = (environment["BATON_LISTEN"].split(":")[1] for environment in (prefill, decode))
        metrics = prefill["BATON_METRICS_LISTEN"].split(":")[1]
        yield from unequal(file, "BATON_PREFILL", decode["BATON_PREFILL"], f"dns:///prefill:{port}")
        yield from unequal(file, "BATON_DECODE", gateway["BATON_DECODE"], f"dns:///decode:{decodes}")
        targets = f"prefill:{metrics},decode:{metrics}"
        yield from unequal(file, "BATON_METRICS_TARGETS", gateway["BATON_METRICS_TARGETS"], targets)


# ---- devices and memory ---------------------------------------------------------------------------------------------


def each_gpu_service_takes_the_gpu_that_its_variable_names() -> Iterator[Problem]:
    gpus = {"prefill": "PREFILL_GPU:-0", "decode": "DECODE_GPU:-1"}
    replicas = {"prefill-2": "PREFILL_2_GPU:-2", "decode-2": "DECODE_2_GPU:-3"}
    wanted = {GPU: gpus | replicas, **{TWO_HOSTS / host / "gpu.yaml": {host: "GPU:-0"} for host in gpus}}
    for file, variables in wanted.items():
        found = {
            service: definition["deploy"]["resources"]["reservations"]["devices"]
            for service, definition in services(file).items()
            if "deploy" in definition
        }
        devices = {
            service: [{"driver": "nvidia", "device_ids": [f"${{{variable}}}"], "capabilities": ["gpu"]}]
            for service, variable in variables.items()
        }
        yield from unequal(file, "devices", found, devices)


def a_replica_differs_in_gpu_and_port_and_answers_to_the_same_name() -> Iterator[Problem]:
    for service in ("prefill", "decode"):
        first, second = dict(services(GPU)[service]), dict(services(GPU)[f"{service}-2"])
        yield from unequal(GPU, "profiles", second.pop("profiles"), ["replicas"])
        yield from unequal(GPU, "networks", second.pop("networks"), {"default": {"aliases": [service]}})
        for definition in (first, second):
            del definition["deploy"]
            definition.pop("ports", None)
        yield from unequal(GPU, f"{service}-2", second, first)


def services_on_cpus_alone_share_the_memory_that_kv_pools_are_found_in() -> Iterator[Problem]:
    """A pool's socket answers only processes of its own user, so no service may set another user. Without nocopy,
    Docker would give the volume the owner and mode of the image's directory.
    """
    for service, definition in services(CPU).items():
        found = [volume for volume in definition.get("volumes", []) if volume.split(":")[1] == str(DIRECTORY)]
        wanted = [f"shm:{DIRECTORY}:nocopy"] if service in ("prefill", "decode") else []
        yield from unequal(CPU, f"memory of {service}", found, wanted)
    for service, definition in _ours(CPU).items():
        yield from unequal(CPU, f"rights of {service}", {"user", "ipc", "shm_size"} & definition.keys(), set())
    volume = document(CPU)["volumes"]["shm"]["driver_opts"]
    yield from unequal(CPU, "shm", (volume["type"], volume["device"]), ("tmpfs", "tmpfs"))
    options = {"mode=1777", "nosuid", "nodev", "noexec"}
    yield from unequal(CPU, "options of shm", options & {*volume["o"].split(",")}, options)


def the_cpu_file_differs_in_image_device_and_shared_memory_only() -> Iterator[Problem]:
    gpu, cpu = deepcopy(document(GPU)), deepcopy(document(CPU))
    del cpu["volumes"]["shm"]
    for service in ("prefill", "decode"):
        volumes = cpu["services"][service]["volumes"]
        cpu["services"][service]["volumes"] = [volume for volume in volumes if not volume.startswith("shm:")]
        del gpu["services"][f"{service}-2"], gpu["services"][service]["deploy"]
        for path, file, device, tag in ((GPU, gpu, "cuda", "cuda"), (CPU, cpu, "cpu", "cpu")):
            definition = file["services"][service]
            yield from unequal(path, "image", filled(definition.pop("image")), f"baton-{service}:{tag}")
            yield from unequal(path, "BATON_DEVICE", definition["environment"].pop("BATON_DEVICE"), device)
    for file in (gpu, cpu):
        del file["x-environment"], file["x-build"]  # YAML has merged them into the services
        for definition in file["services"].values():
            if "build" in definition:
                definition["build"]["args"].pop("COMPILER_PACKAGES", None)  # only kernels on GPUs need it
    yield from unequal(CPU, "the rest", cpu, gpu)


# ---- settings -------------------------------------------------------------------------------------------------------


def services_accept_the_environment_they_get() -> Iterator[Problem]:
    for file in FILES:
        for service in _ours(file):
            try:
                listen = _settings(file, service).listen
            except ConfigError as error:
                yield Problem(file, 0, f"{service}: {error}")
            else:
                yield from unequal(file, f"{service} listens everywhere", listen.startswith("0.0.0.0:"), True)


def the_demo_model_speculates_as_it_is_and_another_by_one_variable() -> Iterator[Problem]:
    other = {"BATON_MODEL": "owner/name"}
    for file in FILES:
        for service in {"prefill", "decode"} & _ours(file).keys():
            for variables, head in (
                ({}, "demo"),
                ({"BATON_DRAFT": "none"}, ""),
                (other, ""),
                ({**other, "BATON_DRAFT": "owner/head"}, "owner/head"),
            ):
                settings = _settings(file, service, **variables)
                yield from unequal(file, f"draft of {service} with {variables}", settings.draft, head)


def decode_computes_prompts_itself_by_default_or_by_variables() -> Iterator[Problem]:
    given = {"BATON_LOCAL_PREFILL_TOKENS": "7", "BATON_PREFILL_FALLBACK": "true"}
    for file, default in ((GPU, 0), (CPU, 128), (DECODE_HOST, 0)):
        for variables, wanted in (({}, (default, False)), (given, (7, True))):
            settings = _settings(file, "decode", **variables)
            found = (settings.max_short_prompt, settings.prefill_fallback)
            yield from unequal(file, f"short prompts with {variables}", found, wanted)


def every_service_is_told_where_traces_go_and_how_many() -> Iterator[Problem]:
    defaults = {"BATON_OTLP_ENDPOINT": "", "BATON_TRACE_SAMPLE_RATIO": "1"}
    wanted = {name: f"${{{name}:-{default}}}" for name, default in defaults.items()}
    for file in FILES:
        for service, definition in _ours(file).items():
            found = {name: definition["environment"].get(name) for name in wanted}
            yield from unequal(file, f"traces of {service}", found, wanted)


def two_hosts_take_the_settings_that_one_host_takes() -> Iterator[Problem]:
    """Addresses differ, and the device comes from the environment, so one file serves GPUs and CPUs."""
    own = {"BATON_DEVICE", "BATON_PREFILL", "BATON_DECODE", "BATON_METRICS_TARGETS"}
    for service in KINDS:
        file = PREFILL_HOST if service == "prefill" else DECODE_HOST
        one, two = services(GPU)[service]["environment"], services(file)[service]["environment"]
        for key in one.keys() - own:
            yield from unequal(file, f"{key} of {service}", two.get(key), one[key])


def between_two_hosts_both_ends_show_certificates() -> Iterator[Problem]:
    prefill = services(PREFILL_HOST)["prefill"]["environment"]
    decode, gateway = (services(DECODE_HOST)[service]["environment"] for service in ("decode", "gateway"))
    authority = "/etc/baton/tls/ca.pem"
    yield from unequal(PREFILL_HOST, "BATON_TLS_CA", prefill["BATON_TLS_CA"], authority)
    yield from unequal(DECODE_HOST, "BATON_PREFILL_TLS_CA", decode["BATON_PREFILL_TLS_CA"], authority)
    tls = (decode["BATON_PREFILL_TLS"], gateway["BATON_DECODE_TLS"])
    yield from unequal(DECODE_HOST, "TLS of prefill and decode", tls, ("true", "true"))
    for file, environment in ((PREFILL_HOST, prefill), (DECODE_HOST, decode)):
        shown = all(environment.get(name) for name in ("BATON_TLS_CERT", "BATON_TLS_KEY"))
        yield from unequal(file, "has a certificate and a key", shown, True)


def every_variable_is_in_the_example_with_its_default() -> Iterator[Problem]:
    """The two files of a pair have their own images, and settings that must be given have no default."""
    for directory in (ROOT, TWO_HOSTS / "prefill", TWO_HOSTS / "decode"):
        example = directory / ".env.example"
        defaults = dict(re.findall(r"^(\w+)=(.*)$", example.read_text(), re.MULTILINE))
        defaults.pop("COMPOSE_FILE", None)
        found = {variable for file in directory.glob("*.yaml") for variable in _VARIABLE.findall(file.read_text())}
        yield from set_apart(example, "variable", defaults.keys(), {variable for variable, _ in found})
        differing = {"PREFILL_IMAGE", "DECODE_IMAGE"} if directory == ROOT else {"PREFILL"}
        for variable, default in sorted(found):
            if variable not in differing:
                yield from unequal(example, variable, defaults.get(variable), default)


@cache
def document(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def services(file: Path) -> Services:
    found: Services = document(file)["services"]
    return found


def _ours(file: Path) -> Services:
    return {service: definition for service, definition in services(file).items() if "build" in definition}


def _ports(definition: dict[str, Any]) -> list[str]:
    return [filled(port) for port in definition.get("ports", [])]


def filled(value: str, **variables: str) -> str:
    """Returns a value as compose reads it, with the variables' defaults where they are not given."""
    return _VARIABLE.sub(lambda found: variables.get(found[1], found[2] or ""), value)


def _settings(file: Path, service: str, **variables: str) -> Any:
    """Returns the settings that a service gets from its environment in the file."""
    environment = services(file)[service]["environment"]
    given = {key: filled(value, PREFILL="prefill.example:50052", **variables) for key, value in environment.items()}
    return settings_from(given, service.removesuffix("-2"))


def settings_from(environment: dict[str, str], service: str) -> Any:
    """Returns the settings that a process of the service gets from these variables. Raises ConfigError."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    with patch.dict(os.environ, {**own, **environment}, clear=True):
        return load_settings(KINDS[service], [], program=service)
