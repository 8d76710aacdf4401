"""Tests that the Kubernetes overlays are valid, say what the compose files say, and name only what exists: settings,
ports, health services, metrics, Secrets.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from baton.cli.main import app as command_line
from baton.service_process import READY_SERVICE
from common.config.gateway_settings import GatewaySettings
from common.config.load import load_settings
from common.config.process_settings import ProcessSettings
from common.config.settings import DecodeSettings, PrefillSettings
from common.kv.shared_pool import DIRECTORY as SHARED_MEMORY
from common.telemetry.engine_metrics import POOL_STATES
from scripts.lint.exports import exported
from tests.kubernetes.manifests import DIRECTORY, KUBECTL, Manifests, Object, overlay, rendered

ROOT = Path(__file__).parents[2]
VERSION = "1.37"
"""The version of Kubernetes whose schemas the objects are checked by."""
README = DIRECTORY / "README.md"
COMPOSE = {"cpu": "compose.cpu.yaml", "gpu": "compose.yaml"}
KINDS: dict[str, type[ProcessSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "gateway": GatewaySettings,
}
SERVICES = ("prefill", "decode")
NAME = "app.kubernetes.io/name"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
ONLY_HERE = {
    # Autoscaling compares rows and slots in use with numbers, so their totals must be known.
    "BATON_MAX_ROWS",
    "BATON_MAX_KV_TOKENS",
    # From the Secret `hub`, if there is one.
    "HF_TOKEN",
}
"""Variables that differ from the compose files."""


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    """The overlay that the README shows: the one for GPUs with TLS and tokens."""
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(DIRECTORY, copy)
    (block,) = re.findall(r"```yaml\n(# overlays/own/kustomization.yaml\n.*?)```", README.read_text(), re.DOTALL)
    (copy / "overlays/own").mkdir()
    (copy / "overlays/own/kustomization.yaml").write_text(block)
    return rendered(copy / "overlays/own")


@pytest.fixture(params=["cpu", "gpu", "secured"])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    if request.param == "secured":
        found: Manifests = request.getfixturevalue("secured")
        return found
    return overlay(request.param)


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def settings_of(manifests: Manifests, name: str) -> Any:
    """Returns the settings that the process gets from its environment."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in manifests.environment(name).items():
            patch.setenv(key, value)
        return load_settings(KINDS[name], [], program=name)


def compose_service(device: str, name: str) -> Object:
    found: Object = yaml.safe_load((ROOT / COMPOSE[device]).read_text())["services"][name]
    return found


def filled(value: str) -> str:
    return re.sub(r"\$\{\w+(?::-([^}]*))?\}", lambda found: found[1] or "", value)


def seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def test_every_object_is_valid_by_the_published_schemas(manifests: Manifests) -> None:
    for found in manifests.objects:
        assert kubernetes_validate.validate(found, VERSION, strict=True) == VERSION


def test_the_schemas_are_those_of_the_version_that_kubectl_has() -> None:
    told = subprocess.run([KUBECTL, "version", "--client"], capture_output=True, text=True, timeout=30, check=True)
    assert f"Client Version: v{VERSION}." in told.stdout


def test_the_validator_refuses_a_field_that_does_not_exist() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"clusterIp": "None"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_there_is_a_deployment_a_service_a_budget_autoscaling_and_a_policy_for_each_of_the_three(
    manifests: Manifests,
) -> None:
    for kind in ("Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"):
        assert set(manifests.of_kind(kind)) == set(KINDS)


def test_each_object_means_the_pods_of_its_own_name(manifests: Manifests) -> None:
    for name in KINDS:
        labels = manifests.pod(name)["metadata"]["labels"]
        assert labels == {NAME: name}
        assert manifests.of_kind("Service")[name]["spec"]["selector"] == labels
        assert manifests.of_kind("NetworkPolicy")[name]["spec"]["podSelector"] == {"matchLabels": labels}
        for kind in ("Deployment", "PodDisruptionBudget"):
            assert manifests.of_kind(kind)[name]["spec"]["selector"] == {"matchLabels": labels}
        (spread,) = manifests.pod(name)["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"] == {"matchLabels": labels}
        scaled = manifests.of_kind("HorizontalPodAutoscaler")[name]["spec"]["scaleTargetRef"]
        assert scaled == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}


def test_everything_is_in_one_namespace_whose_standard_refuses_rights(manifests: Manifests) -> None:
    (namespace,) = manifests.of_kind("Namespace").values()
    others = {found["metadata"]["namespace"] for found in manifests.objects if found is not namespace}
    assert others == {namespace["metadata"]["name"]}
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_every_volume_is_mounted_and_every_mount_has_a_volume(manifests: Manifests) -> None:
    claims = set()
    for name in KINDS:
        volumes = {volume["name"]: volume for volume in manifests.pod(name)["spec"]["volumes"]}
        assert {mount["name"] for mount in manifests.container(name)["volumeMounts"]} == set(volumes)
        claims |= {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
    assert claims == set(manifests.of_kind("PersistentVolumeClaim"))


def test_each_settings_map_is_used_and_each_of_its_keys_is_a_setting_of_every_process_that_gets_it(
    manifests: Manifests,
) -> None:
    """A process ignores a variable that only another process knows, so loading alone would not tell."""
    unused = set(manifests.of_kind("ConfigMap"))
    for name, kind in KINDS.items():
        environment = manifests.environment(name)
        assert {key.removeprefix("BATON_").lower() for key in environment} <= set(kind.model_fields)
        unused -= {source["configMapRef"]["name"] for source in manifests.container(name)["envFrom"]}
    assert not unused


@pytest.mark.parametrize("name", KINDS)
def test_the_environment_is_that_of_compose(device: str, name: str) -> None:
    compose = {key: filled(value) for key, value in compose_service(device, name)["environment"].items()}
    here = overlay(device).environment(name)
    assert {key: value for key, value in here.items() if key not in ONLY_HERE} == {
        key: value for key, value in compose.items() if key not in ONLY_HERE
    }


@pytest.mark.parametrize("name", KINDS)
def test_images_waits_and_intervals_are_those_of_compose(device: str, name: str) -> None:
    compose, container = compose_service(device, name), overlay(device).container(name)
    image = filled(compose["image"])
    assert container["image"] == (image if ":" in image else f"{image}:latest")
    assert "command" not in container and "args" not in container and "command" not in compose
    health = compose["healthcheck"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["periodSeconds"] == seconds(health["interval"])
        assert container[probe]["timeoutSeconds"] == seconds(health["timeout"])
        assert container[probe]["failureThreshold"] == health["retries"]
    if name in SERVICES:
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] == seconds(filled(health["start_period"]))


@pytest.mark.parametrize("name", KINDS)
def test_the_process_accepts_the_environment_it_gets(manifests: Manifests, name: str) -> None:
    assert settings_of(manifests, name).listen.startswith("0.0.0.0:")


def test_containers_have_the_ports_that_their_settings_name(manifests: Manifests) -> None:
    for name in SERVICES:
        settings = settings_of(manifests, name)
        assert manifests.ports(name) == {"grpc": port_of(settings.listen), "metrics": port_of(settings.metrics_listen)}
    assert manifests.ports("gateway") == {"http": port_of(settings_of(manifests, "gateway").listen)}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_services_have_the_ports_of_their_pods_and_those_of_the_pair_are_headless(manifests: Manifests) -> None:
    """The address of a virtual service would hide that a pod was replaced."""
    for name in KINDS:
        spec = manifests.of_kind("Service")[name]["spec"]
        assert {port["targetPort"]: port["port"] for port in spec["ports"]} == manifests.ports(name)
        assert spec.get("clusterIP") == ("None" if name in SERVICES else None)
        assert "publishNotReadyAddresses" not in spec


def test_the_variables_that_kubernetes_would_add_for_services_are_left_out(manifests: Manifests) -> None:
    """A Service whose name begins with `baton` would add variables that the processes refuse."""
    assert all(manifests.pod(name)["spec"]["enableServiceLinks"] is False for name in KINDS)


@dataclass(frozen=True, order=True)
class Talk:
    """Pods `source` may open connections to the port `port` of pods `target`. An empty `source` means everybody."""

    source: str
    target: str
    port: str


def allowed(manifests: Manifests) -> Iterator[Talk]:
    for target, policy in manifests.of_kind("NetworkPolicy").items():
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            for peer in rule.get("from", [{}]):
                kind = next(iter(peer), None)
                source = ",".join("=".join(pair) for pair in peer[kind]["matchLabels"].items()) if kind else ""
                assert len(peer) <= 1
                yield from (Talk(source, target, port["port"]) for port in rule["ports"])


def needed(manifests: Manifests) -> Iterator[Talk]:
    """Yields who talks to whom by the settings, and who else has to: Prometheus, chosen clients, and HTTP clients."""

    def talk(source: str, address: str) -> Talk:
        target, port = address.removeprefix("dns:///").split(":")
        names = {number: name for name, number in manifests.ports(target).items()}
        return Talk(f"{NAME}={source}", target, names[int(port)])

    yield from (talk("decode", address) for address in settings_of(manifests, "decode").prefill)
    gateway = settings_of(manifests, "gateway")
    yield from (talk("gateway", address) for address in (*gateway.decode, *gateway.metrics_targets))
    yield from (Talk("kubernetes.io/metadata.name=monitoring", name, "metrics") for name in SERVICES)
    yield Talk("calls-decode=true", "decode", "grpc")
    yield Talk("", "gateway", "http")


def test_exactly_those_may_connect_who_talk(manifests: Manifests) -> None:
    assert sorted(allowed(manifests)) == sorted(needed(manifests))
    assert all(f"`{name}`" in README.read_text() for name in ("calls-decode=true", "monitoring"))


def asked(probe: Object) -> tuple[str, int | str]:
    """Returns the health service or path that a probe asks for, and the port."""
    if "grpc" in probe:
        return probe["grpc"].get("service", ""), probe["grpc"]["port"]
    if "httpGet" in probe:
        return probe["httpGet"]["path"], probe["httpGet"]["port"]
    program, health, address, *options = probe["exec"]["command"]
    assert (program, health) == ("baton", "health")
    services = [option.removeprefix("--service=") for option in options if option.startswith("--service=")]
    return (services or [""])[0], port_of(address)


def test_liveness_is_the_process_and_readiness_is_whether_it_serves(manifests: Manifests) -> None:
    """A decode service without a prefill service is not ready, and must not be restarted for it."""
    for name in SERVICES:
        probes = [asked(manifests.container(name)[probe]) for probe in PROBES]
        port = manifests.ports(name)["grpc"]
        assert probes == [("", port), ("", port), (READY_SERVICE[name], port)]
    probes = [asked(manifests.container("gateway")[probe]) for probe in PROBES]
    assert probes == [("/health/live", "http"), ("/health/live", "http"), ("/health", "http")]


def test_probes_by_command_use_words_that_the_command_line_knows(secured: Manifests) -> None:
    """Runs the commands with `--help` added: nothing is sent, but unknown options are still refused."""
    for name in SERVICES:
        for probe in PROBES:
            _, *arguments = secured.container(name)[probe]["exec"]["command"]
            assert CliRunner().invoke(command_line, [*arguments, "--help"]).exit_code == 0


def test_kubernetes_waits_longer_than_a_process_takes_to_drain(manifests: Manifests) -> None:
    for name in KINDS:
        stop = manifests.container(name).get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        to_drain_s = stop["sleep"]["seconds"] + settings_of(manifests, name).grace_period_s + 10
        assert manifests.pod(name)["spec"]["terminationGracePeriodSeconds"] > to_drain_s


def test_only_the_gateway_is_reached_by_a_virtual_address_and_stays_until_nodes_know_that_it_leaves(
    manifests: Manifests,
) -> None:
    waits = {name: "lifecycle" in manifests.container(name) for name in KINDS}
    assert waits == {"prefill": False, "decode": False, "gateway": True}


def test_a_container_has_no_rights(manifests: Manifests) -> None:
    (user,) = re.findall(r"useradd .*--uid (\d+)", (ROOT / "Dockerfile").read_text())
    for name in KINDS:
        spec, container = manifests.pod(name)["spec"], manifests.container(name)
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert {spec["securityContext"][who] for who in ("runAsUser", "runAsGroup", "fsGroup")} == {int(user)}
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["imagePullPolicy"] == "IfNotPresent"


def test_what_is_written_goes_to_the_home_or_to_bounded_memory(manifests: Manifests) -> None:
    (home,) = re.findall(r"--home-dir (\S+)", (ROOT / "Dockerfile").read_text())
    for name in KINDS:
        volumes = {volume["name"]: volume for volume in manifests.pod(name)["spec"]["volumes"]}
        paths = {mount["mountPath"]: volumes[mount["name"]] for mount in manifests.container(name)["volumeMounts"]}
        in_memory = {path for path, volume in paths.items() if volume.get("emptyDir", {}).get("medium") == "Memory"}
        assert in_memory == ({"/tmp", str(SHARED_MEMORY)} if name in SERVICES else {"/tmp"})
        assert all("sizeLimit" in paths[path]["emptyDir"] for path in in_memory)
        on_disk = {path for path, volume in paths.items() if "persistentVolumeClaim" in volume}
        assert on_disk == ({home} if name in SERVICES else set())


def test_every_container_says_what_it_needs_and_a_gpu_is_one_whole_gpu(device: str) -> None:
    for name in KINDS:
        resources = overlay(device).container(name)["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"])
        assert "memory" in resources["limits"]
        gpus = [resources[part].get("nvidia.com/gpu") for part in ("requests", "limits")]
        assert gpus == (["1", "1"] if device == "gpu" and name in SERVICES else [None, None])


def test_the_overlays_differ_in_device_image_resources_nodes_rollout_storage_and_autoscaling_only() -> None:
    def without(manifests: Manifests) -> list[Object]:
        rest = []
        for found in manifests.objects:
            kept = yaml.safe_load(yaml.safe_dump(found))
            if found["kind"] in ("PersistentVolumeClaim", "HorizontalPodAutoscaler"):
                continue
            if found["kind"] == "ConfigMap" and found["metadata"]["name"].startswith("services-"):
                kept["metadata"].pop("name")
                for key in ("BATON_DEVICE", "BATON_MAX_ROWS", "BATON_MAX_KV_TOKENS"):
                    del kept["data"][key]
            if found["kind"] == "Deployment" and found["metadata"]["name"] in SERVICES:
                spec = kept["spec"]["template"]["spec"]
                del kept["spec"]["strategy"], spec["containers"][0]["image"], spec["containers"][0]["resources"]
                spec["containers"][0]["envFrom"].pop(1)
                spec.pop("nodeSelector", None), spec.pop("tolerations", None)
            rest.append(kept)
        return rest

    assert without(overlay("cpu")) == without(overlay("gpu"))


def pods_metrics(manifests: Manifests, name: str) -> list[Object]:
    return [metric["pods"] for metric in manifests.of_kind("HorizontalPodAutoscaler")[name]["spec"]["metrics"]]


def test_autoscaling_asks_for_metrics_that_its_service_exports_by_labels_that_they_have(manifests: Manifests) -> None:
    exports = exported()
    for name in KINDS:
        for pods in pods_metrics(manifests, name):
            selector = pods["metric"].get("selector", {"matchExpressions": []})
            assert {expression["key"] for expression in selector["matchExpressions"]} <= exports[name][
                pods["metric"]["name"]
            ]


def test_a_service_is_scaled_at_a_part_of_what_it_can_hold(manifests: Manifests) -> None:
    decode, gateway = settings_of(manifests, "decode"), settings_of(manifests, "gateway")
    targets = {
        pods["metric"]["name"]: int(pods["target"]["averageValue"])
        for name in KINDS
        for pods in pods_metrics(manifests, name)
    }
    assert targets.pop("baton_uncomputed_tokens") % settings_of(manifests, "prefill").max_batch_tokens == 0
    assert targets == {
        "baton_rows": decode.max_rows * 3 // 4,
        "baton_kv_slots": decode.max_kv_tokens * 3 // 4,
        "baton_gateway_open_requests": gateway.max_open_requests // 2,
    }


def test_rows_and_slots_count_in_every_state_that_cannot_be_given_away(manifests: Manifests) -> None:
    for pods in pods_metrics(manifests, "decode"):
        (expression,) = pods["metric"]["selector"]["matchExpressions"]
        assert (expression["key"], expression["operator"]) == ("state", "In")
        assert set(expression["values"]) == set(POOL_STATES) - {"free", "cached"}


def test_the_adapter_offers_what_autoscaling_asks_for_and_prometheus_has_the_labels_it_needs(
    manifests: Manifests,
) -> None:
    (rule,) = yaml.safe_load((DIRECTORY / "monitoring/adapter.yml").read_text())["rules"]
    (names,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    wanted = {pods["metric"]["name"] for name in KINDS for pods in pods_metrics(manifests, name)}
    assert set(names.split("|")) == wanted
    for job in yaml.safe_load((DIRECTORY / "monitoring/prometheus.yml").read_text())["scrape_configs"]:
        (kept,) = [relabel["regex"] for relabel in job["relabel_configs"] if relabel.get("action") == "keep"]
        scraped = [name for name in KINDS if kept in manifests.ports(name)]
        assert scraped == (["gateway"] if job["job_name"] == "gateway" else list(SERVICES))
        written = {relabel["target_label"] for relabel in job["relabel_configs"] if "target_label" in relabel}
        assert written == set(rule["resources"]["overrides"]) | {"job"}


def secrets_of_the_readme() -> dict[str, set[str]]:
    """Returns the Secrets that the README's commands make, with their keys."""
    made = {}
    for name, options in re.findall(r"create secret generic (\S+) (.*)", README.read_text()):
        made[name] = {option.removeprefix("--from-file=").partition("=")[0] for option in options.split()}
    return made


def files_named(manifests: Manifests, name: str) -> set[str]:
    """Returns the files that the Deployment's settings and probes name."""
    commands = [manifests.container(name)[probe].get("exec", {}).get("command", []) for probe in PROBES]
    values = [*manifests.environment(name).values(), *(word.rpartition("=")[2] for words in commands for word in words)]
    return {value for value in values if value.startswith("/etc/baton/")}


def test_every_file_that_is_named_is_a_key_of_a_secret_that_the_readme_makes_and_every_key_is_used(
    secured: Manifests,
) -> None:
    used: dict[str, set[str]] = {"hub": {"token"}}
    for name in KINDS:
        mounts = {mount["name"]: mount for mount in secured.container(name)["volumeMounts"]}
        files = files_named(secured, name)
        for volume in secured.pod(name)["spec"]["volumes"]:
            if "secret" not in volume:
                continue
            secret, mount = volume["secret"], mounts[volume["name"]]
            assert mount["readOnly"] is True
            assert secret["defaultMode"] == 0o400
            here = {file for file in files if file.startswith(f"{mount['mountPath']}/")}
            keys = {file.removeprefix(f"{mount['mountPath']}/") for file in here}
            if "items" in secret:
                assert all(item["key"] == item["path"] for item in secret["items"])
                assert {item["key"] for item in secret["items"]} == keys
            used.setdefault(secret["secretName"], set()).update(keys)
            files -= here
        assert not files
    assert used == secrets_of_the_readme()


def test_with_certificates_and_tokens_everybody_shows_one_and_nobody_is_asked_in_plain_text(secured: Manifests) -> None:
    prefill, decode, gateway = (settings_of(secured, name) for name in KINDS)
    assert (
        prefill.tls_ca and decode.prefill_tls and decode.prefill_tls_ca and gateway.decode_tls and gateway.decode_tls_ca
    )
    assert prefill.auth_token_file == decode.prefill_token_file
    assert decode.auth_token_file and gateway.decode_token_file and gateway.api_key_file
    for probe in PROBES:
        assert secured.container("gateway")[probe]["httpGet"]["scheme"] == "HTTPS"
        for name in SERVICES:
            command = secured.container(name)[probe]["exec"]["command"]
            assert {"--tls", f"--server-name={name}"} <= set(command)
