"""The Kubernetes overlays are valid, say what the compose files say, and name only what exists: settings, ports, health
services, metrics, Secrets.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import yaml
from typer.testing import CliRunner

from baton.cli.main import app
from baton.service_process import READY_SERVICE
from common.kv.shared_pool import DIRECTORY as SHARED_MEMORY
from common.telemetry.metrics import POOL_STATES
from scripts.lint.compose import CPU, DOCKERFILE, GPU, KINDS, filled, services, settings_from
from scripts.lint.exports import exported
from scripts.lint.problem import Problem, set_apart, unequal
from tests.kubernetes.manifests import DIRECTORY, KUBECTL, Manifests, Object, overlay, rendered

VERSION = "1.37"
"""The version of Kubernetes whose schemas the objects are checked by."""
README = DIRECTORY / "README.md"
OVERLAYS = {"cpu": DIRECTORY / "overlays/cpu", "gpu": DIRECTORY / "overlays/gpu", "secured": README}
COMPOSE = {"cpu": CPU, "gpu": GPU}
PAIR = ("prefill", "decode")
FOR_EACH = ("Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy")
NAME = "app.kubernetes.io/name"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
ASKED_FOR = {
    "prefill": ("", READY_SERVICE["prefill"]),
    "decode": ("", READY_SERVICE["decode"]),
    "gateway": ("/health/live", "/health"),
}
"""The health services or paths that tell whether a process lives, and whether it serves."""
ONLY_HERE = {
    # Compose publishes on loopback, where a host that is no name of the machine's is a page's.
    "BATON_ALLOWED_HOSTS",
    # Autoscaling compares rows and slots in use with numbers, so their totals must be known.
    "BATON_MAX_ROWS",
    "BATON_MAX_KV_TOKENS",
    # From the Secret `hub`, if there is one.
    "HF_TOKEN",
}
"""Variables that differ from the compose files."""


# ---- objects --------------------------------------------------------------------------------------------------------


def every_object_is_valid_by_the_published_schemas() -> Iterator[Problem]:
    for path, manifests in _all():
        for found in manifests.objects:
            try:
                kubernetes_validate.validate(found, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield Problem(path, 0, f"{found['kind']} {found['metadata']['name']}: {error.message}")


def the_schemas_are_those_of_the_version_that_kubectl_has() -> Iterator[Problem]:
    command = [str(KUBECTL), "version", "--client"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    yield from unequal(Path(__file__), f"kubectl has {VERSION}", f"Client Version: v{VERSION}." in told, True)


def there_is_one_object_of_each_kind_for_each_of_the_three() -> Iterator[Problem]:
    for path, manifests in _all():
        for kind in FOR_EACH:
            yield from unequal(path, kind, manifests.of_kind(kind).keys(), KINDS.keys())


def each_object_means_the_pods_of_its_own_name() -> Iterator[Problem]:
    for path, manifests in _all():
        for name in KINDS:
            labels = {NAME: name}
            spec = {kind: manifests.of_kind(kind)[name]["spec"] for kind in FOR_EACH}
            (spread,) = manifests.pod(name)["spec"]["topologySpreadConstraints"]
            selectors = [
                manifests.pod(name)["metadata"]["labels"],
                spec["Service"]["selector"],
                spec["NetworkPolicy"]["podSelector"]["matchLabels"],
                spec["Deployment"]["selector"]["matchLabels"],
                spec["PodDisruptionBudget"]["selector"]["matchLabels"],
                spread["labelSelector"]["matchLabels"],
            ]
            yield from unequal(path, f"labels of {name}", selectors, [labels] * len(selectors))
            scaled = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
            yield from unequal(path, f"scaling of {name}", spec["HorizontalPodAutoscaler"]["scaleTargetRef"], scaled)


def everything_is_in_one_namespace_whose_standard_refuses_rights() -> Iterator[Problem]:
    for path, manifests in _all():
        (namespace,) = manifests.of_kind("Namespace").values()
        others = {found["metadata"]["namespace"] for found in manifests.objects if found is not namespace}
        yield from unequal(path, "namespaces", others, {namespace["metadata"]["name"]})
        standard = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        yield from unequal(path, "the namespace's standard", standard, "restricted")


def every_volume_is_mounted_and_every_mount_has_a_volume() -> Iterator[Problem]:
    for path, manifests in _all():
        claims = set()
        for name in KINDS:
            mounted = {mount["name"] for mount in manifests.container(name)["volumeMounts"]}
            yield from unequal(path, f"mounts of {name}", mounted, _volumes(manifests, name).keys())
            volumes = _volumes(manifests, name).values()
            claims |= {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}
        yield from unequal(path, "claims", claims, manifests.of_kind("PersistentVolumeClaim").keys())


# ---- settings -------------------------------------------------------------------------------------------------------


def each_key_of_a_settings_map_is_a_setting_of_every_process_that_gets_it() -> Iterator[Problem]:
    """A process ignores a variable that only another process knows, so loading alone would not tell."""
    for path, manifests in _all():
        unused = set(manifests.of_kind("ConfigMap"))
        for name, kind in KINDS.items():
            keys = {key.removeprefix("BATON_").lower() for key in manifests.environment(name)}
            yield from unequal(path, f"unknown settings of {name}", keys - kind.model_fields.keys(), set())
            unused -= {source["configMapRef"]["name"] for source in manifests.container(name)["envFrom"]}
        yield from unequal(path, "unused maps of settings", unused, set())


def the_environment_is_that_of_compose() -> Iterator[Problem]:
    for device, file in COMPOSE.items():
        for name in KINDS:
            compose = {key: filled(value) for key, value in services(file)[name]["environment"].items()}
            here = overlay(device).environment(name)
            for key in (here.keys() | compose.keys()) - ONLY_HERE:
                yield from unequal(OVERLAYS[device], f"{key} of {name}", here.get(key), compose.get(key))


def images_waits_and_intervals_are_those_of_compose() -> Iterator[Problem]:
    for device, file in COMPOSE.items():
        for name in KINDS:
            compose, container = services(file)[name], overlay(device).container(name)
            image, health = filled(compose["image"]), compose["healthcheck"]
            wanted = image if ":" in image else f"{image}:latest"
            yield from unequal(OVERLAYS[device], f"image of {name}", container["image"], wanted)
            commands = {"command", "args"} & (container.keys() | compose.keys())
            yield from unequal(OVERLAYS[device], f"commands of {name}", commands, set())
            interval = [_seconds(health["interval"]), _seconds(health["timeout"]), health["retries"]]
            for probe in ("livenessProbe", "readinessProbe"):
                found = [container[probe][key] for key in ("periodSeconds", "timeoutSeconds", "failureThreshold")]
                yield from unequal(OVERLAYS[device], f"{probe} of {name}", found, interval)
            if name in PAIR:
                startup = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
                wanted_s = _seconds(filled(health["start_period"]))
                yield from unequal(OVERLAYS[device], f"seconds for the start of {name}", startup, wanted_s)


def containers_have_the_ports_that_their_settings_name() -> Iterator[Problem]:
    """This loads each process's settings from its environment, and so tests that it accepts them."""
    for path, manifests in _all():
        for name in KINDS:
            settings = _settings(manifests, name)
            wanted = {"grpc" if name in PAIR else "http": _port_of(settings.listen)}
            if name in PAIR:
                wanted["metrics"] = _port_of(settings.metrics_listen)
            yield from unequal(path, f"ports of {name}", manifests.ports(name), wanted)
            yield from unequal(path, f"{name} listens", settings.listen.rpartition(":")[0], "0.0.0.0")


# ---- network --------------------------------------------------------------------------------------------------------


def services_have_the_ports_of_their_pods_and_those_of_the_pair_are_headless() -> Iterator[Problem]:
    """The address of a virtual service would hide that a pod was replaced."""
    for path, manifests in _all():
        for name in KINDS:
            spec = manifests.of_kind("Service")[name]["spec"]
            ports = {port["targetPort"]: port["port"] for port in spec["ports"]}
            yield from unequal(path, f"ports of {name}", ports, manifests.ports(name))
            yield from unequal(path, f"address of {name}", spec.get("clusterIP"), "None" if name in PAIR else None)
            yield from unequal(path, f"unready pods of {name}", spec.get("publishNotReadyAddresses"), None)


def the_variables_that_kubernetes_would_add_for_services_are_left_out() -> Iterator[Problem]:
    """A Service whose name begins with `baton` would add variables that the processes refuse."""
    for path, manifests in _all():
        for name in KINDS:
            found = manifests.pod(name)["spec"].get("enableServiceLinks")
            yield from unequal(path, f"enableServiceLinks of {name}", found, False)


class Talk(NamedTuple):
    """Pods `source` may open connections to the port `port` of pods `target`. An empty `source` means everybody."""

    source: str
    target: str
    port: str


def exactly_those_may_connect_who_talk() -> Iterator[Problem]:
    for path, manifests in _all():
        yield from unequal(path, "who may connect", sorted(_allowed(manifests)), sorted(_needed(manifests)))
    for name in ("calls-decode=true", "monitoring"):
        yield from unequal(README, f"names {name}", f"`{name}`" in README.read_text(), True)


def _allowed(manifests: Manifests) -> Iterator[Talk]:
    for target, policy in manifests.of_kind("NetworkPolicy").items():
        assert policy["spec"]["policyTypes"] == ["Ingress"], f"{target}: other policies than Ingress"
        for rule in policy["spec"]["ingress"]:
            for peer in rule.get("from", [{}]):
                assert len(peer) <= 1, f"{target}: a peer with two conditions"
                kind = next(iter(peer), None)
                source = ",".join("=".join(pair) for pair in peer[kind]["matchLabels"].items()) if kind else ""
                yield from (Talk(source, target, port["port"]) for port in rule["ports"])


def _needed(manifests: Manifests) -> Iterator[Talk]:
    """Yields who talks to whom by the settings, and who else has to: Prometheus, chosen clients, and HTTP clients."""

    def talk(source: str, address: str) -> Talk:
        target, port = address.removeprefix("dns:///").split(":")
        names = {number: name for name, number in manifests.ports(target).items()}
        return Talk(f"{NAME}={source}", target, names[int(port)])

    yield from (talk("decode", address) for address in _settings(manifests, "decode").prefill)
    gateway = _settings(manifests, "gateway")
    yield from (talk("gateway", address) for address in (*gateway.decode, *gateway.metrics_targets))
    yield from (Talk("kubernetes.io/metadata.name=monitoring", name, "metrics") for name in PAIR)
    yield Talk("calls-decode=true", "decode", "grpc")
    yield Talk("", "gateway", "http")


# ---- life -----------------------------------------------------------------------------------------------------------


def liveness_is_the_process_and_readiness_is_whether_it_serves() -> Iterator[Problem]:
    """A decode service without a prefill service is not ready, and must not be restarted for it."""
    for path, manifests in _all():
        for name in KINDS:
            asked = [_asked(manifests.container(name)[probe]) for probe in PROBES]
            port = manifests.ports(name)["grpc"] if name in PAIR else "http"
            alive, ready = ASKED_FOR[name]
            yield from unequal(path, f"probes of {name}", asked, [(alive, port), (alive, port), (ready, port)])


def probes_by_command_use_words_that_the_command_line_knows() -> Iterator[Problem]:
    """Runs the commands with `--help` added: nothing is sent, but unknown options are still refused."""
    for name in PAIR:
        for probe in PROBES:
            _, *arguments = _secured().container(name)[probe]["exec"]["command"]
            status = CliRunner().invoke(app, [*arguments, "--help"]).exit_code
            yield from unequal(README, f"status of {probe} of {name}", status, 0)


def kubernetes_waits_longer_than_a_process_takes_to_drain() -> Iterator[Problem]:
    """Only the gateway is reached by a virtual address, and stays until nodes know that it leaves."""
    for path, manifests in _all():
        for name in KINDS:
            yield from unequal(path, f"{name} stays", "lifecycle" in manifests.container(name), name not in PAIR)
            stop = manifests.container(name).get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
            drains_s = stop["sleep"]["seconds"] + _settings(manifests, name).grace_period_s + 10
            if manifests.pod(name)["spec"]["terminationGracePeriodSeconds"] <= drains_s:
                yield Problem(path, 0, f"{name} is killed while it may drain")


def a_container_has_no_rights() -> Iterator[Problem]:
    (user,) = re.findall(r"useradd .*--uid (\d+)", DOCKERFILE.read_text())
    ids = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), int(user))
    own = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for path, manifests in _all():
        for name in KINDS:
            spec, container = manifests.pod(name)["spec"], manifests.container(name)
            of_pod = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **ids}
            found = {key: spec["securityContext"].get(key) for key in of_pod}
            yield from unequal(path, f"rights of the pod {name}", found, of_pod)
            yield from unequal(path, f"rights of {name}", container["securityContext"], own)
            yield from unequal(path, f"token of {name}", spec["automountServiceAccountToken"], False)
            yield from unequal(path, f"pulls of {name}", container["imagePullPolicy"], "IfNotPresent")


# ---- storage and devices --------------------------------------------------------------------------------------------


def what_is_written_goes_to_the_home_or_to_bounded_memory() -> Iterator[Problem]:
    (home,) = re.findall(r"--home-dir (\S+)", DOCKERFILE.read_text())
    for path, manifests in _all():
        for name in KINDS:
            volumes = _volumes(manifests, name)
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in manifests.container(name)["volumeMounts"]}
            in_memory = {
                place for place, volume in mounts.items() if volume.get("emptyDir", {}).get("medium") == "Memory"
            }
            wanted = {"/tmp", str(SHARED_MEMORY)} if name in PAIR else {"/tmp"}
            yield from unequal(path, f"memory of {name}", in_memory, wanted)
            bounded = {place for place in in_memory if "sizeLimit" in mounts[place]["emptyDir"]}
            yield from unequal(path, f"bounded memory of {name}", bounded, in_memory)
            on_disk = {place for place, volume in mounts.items() if "persistentVolumeClaim" in volume}
            yield from unequal(path, f"disks of {name}", on_disk, {home} if name in PAIR else set())


def every_container_says_what_it_needs_and_a_gpu_is_one_whole_gpu() -> Iterator[Problem]:
    for device in COMPOSE:
        for name in KINDS:
            resources = overlay(device).container(name)["resources"]
            missing = {"cpu", "memory"} - resources["requests"].keys() | {"memory"} - resources["limits"].keys()
            yield from unequal(OVERLAYS[device], f"resources that {name} does not name", missing, set())
            gpus = [resources[part].get("nvidia.com/gpu") for part in ("requests", "limits")]
            wanted = "1" if device == "gpu" and name in PAIR else None
            yield from unequal(OVERLAYS[device], f"GPUs of {name}", gpus, [wanted, wanted])


def overlays_differ_in_device_image_resources_nodes_rollout_storage_and_autoscaling_only() -> Iterator[Problem]:
    cpu, gpu = (_without_what_differs(overlay(device)) for device in COMPOSE)
    for of_cpu, of_gpu in zip(cpu, gpu, strict=True):
        yield from unequal(OVERLAYS["cpu"], of_gpu["metadata"].get("name", "settings"), of_cpu, of_gpu)


def _without_what_differs(manifests: Manifests) -> list[Object]:
    rest = []
    for found in manifests.objects:
        kept, name = deepcopy(found), found["metadata"]["name"]
        if found["kind"] in ("PersistentVolumeClaim", "HorizontalPodAutoscaler"):
            continue
        if found["kind"] == "ConfigMap" and name.startswith("services-"):
            kept["metadata"].pop("name")
            for key in ("BATON_DEVICE", "BATON_MAX_ROWS", "BATON_MAX_KV_TOKENS"):
                del kept["data"][key]
        if found["kind"] == "Deployment" and name in PAIR:
            spec = kept["spec"]["template"]["spec"]
            del kept["spec"]["strategy"], spec["containers"][0]["image"], spec["containers"][0]["resources"]
            spec["containers"][0]["envFrom"].pop(1)
            spec.pop("nodeSelector", None), spec.pop("tolerations", None)
        rest.append(kept)
    return rest


# ---- autoscaling ----------------------------------------------------------------------------------------------------


def autoscaling_asks_for_metrics_that_its_service_exports_by_labels_that_they_have() -> Iterator[Problem]:
    for path, manifests in _all():
        for name in KINDS:
            for pods in _pods_metrics(manifests, name):
                metric = pods["metric"]
                labels = {each["key"] for each in metric.get("selector", {}).get("matchExpressions", [])}
                unknown = labels - exported()[name].get(metric["name"], set())
                yield from unequal(path, f"labels that {metric['name']} has not", unknown, set())
                yield from unequal(path, f"{metric['name']} is exported", metric["name"] in exported()[name], True)


def a_service_is_scaled_at_a_part_of_what_it_can_hold() -> Iterator[Problem]:
    for path, manifests in _all():
        prefill, decode, gateway = (_settings(manifests, name) for name in KINDS)
        targets = {
            pods["metric"]["name"]: int(pods["target"]["averageValue"])
            for name in KINDS
            for pods in _pods_metrics(manifests, name)
        }
        rest = targets.pop("baton_uncomputed_tokens") % prefill.most_batch_tokens
        yield from unequal(path, "tokens that fill no forward", rest, 0)
        wanted = {
            "baton_rows": decode.max_rows * 3 // 4,
            "baton_kv_slots": decode.max_kv_tokens * 3 // 4,
            "baton_gateway_open_requests": gateway.max_open_requests // 2,
        }
        yield from unequal(path, "targets", targets, wanted)


def rows_and_slots_count_in_every_state_that_cannot_be_given_away() -> Iterator[Problem]:
    for path, manifests in _all():
        for pods in _pods_metrics(manifests, "decode"):
            (expression,) = pods["metric"]["selector"]["matchExpressions"]
            found = (expression["key"], expression["operator"], {*expression["values"]})
            yield from unequal(path, "states", found, ("state", "In", {*POOL_STATES} - {"free", "cached"}))


def the_adapter_offers_what_autoscaling_asks_for_by_labels_that_prometheus_writes() -> Iterator[Problem]:
    adapter, prometheus = DIRECTORY / "monitoring/adapter.yml", DIRECTORY / "monitoring/prometheus.yml"
    (rule,) = yaml.safe_load(adapter.read_text())["rules"]
    (names,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    for _, manifests in _all():
        asked = {pods["metric"]["name"] for name in KINDS for pods in _pods_metrics(manifests, name)}
        yield from set_apart(adapter, "metric", {*names.split("|")}, asked)
        for job in yaml.safe_load(prometheus.read_text())["scrape_configs"]:
            labels = job["relabel_configs"]
            (kept,) = [label["regex"] for label in labels if label.get("action") == "keep"]
            scraped = [name for name in KINDS if kept in manifests.ports(name)]
            wanted = ["gateway"] if job["job_name"] == "gateway" else list(PAIR)
            yield from unequal(prometheus, f"pods of {job['job_name']}", scraped, wanted)
            written = {label["target_label"] for label in labels if "target_label" in label}
            yield from unequal(prometheus, "labels", written, {*rule["resources"]["overrides"], "job"})


# ---- certificates and tokens ----------------------------------------------------------------------------------------


def every_file_that_is_named_is_in_a_secret_of_the_readme_and_every_key_is_used() -> Iterator[Problem]:
    manifests = _secured()
    used: dict[str, set[str]] = {"hub": {"token"}}
    for name in KINDS:
        mounts = {mount["name"]: mount for mount in manifests.container(name)["volumeMounts"]}
        files = _files_named(manifests, name)
        for volume in _volumes(manifests, name).values():
            if "secret" not in volume:
                continue
            secret, mount = volume["secret"], mounts[volume["name"]]
            rights = (mount["readOnly"], secret["defaultMode"])
            yield from unequal(README, f"rights of {volume['name']}", rights, (True, 0o400))
            here = {file for file in files if file.startswith(f"{mount['mountPath']}/")}
            keys = {file.removeprefix(f"{mount['mountPath']}/") for file in here}
            if "items" in secret:
                items = {(item["key"], item["path"]) for item in secret["items"]}
                yield from unequal(README, f"items of {volume['name']}", items, {(key, key) for key in keys})
            used.setdefault(secret["secretName"], set()).update(keys)
            files -= here
        yield from unequal(README, f"files of {name} without a Secret", files, set())
    yield from unequal(README, "Secrets", _secrets_of_the_readme(), used)


def with_certificates_everybody_shows_one_and_nobody_is_asked_in_plain_text() -> Iterator[Problem]:
    prefill, decode, gateway = (_settings(_secured(), name) for name in KINDS)
    given = {
        "prefill": (prefill.tls_ca,),
        "decode": (decode.prefill_tls, decode.prefill_tls_ca, decode.auth_token_file),
        "gateway": (gateway.decode_tls, gateway.decode_tls_ca, gateway.decode_token_file, gateway.api_key_file),
    }
    for name, values in given.items():
        yield from unequal(README, f"{name} has certificates and tokens", all(values), True)
    yield from unequal(README, "decode's token at prefill", decode.prefill_token_file, prefill.auth_token_file)
    for probe in PROBES:
        scheme = _secured().container("gateway")[probe]["httpGet"]["scheme"]
        yield from unequal(README, f"{probe} of the gateway", scheme, "HTTPS")
        for name in PAIR:
            options = {"--tls", f"--server-name={name}"}
            given_options = options & {*_secured().container(name)[probe]["exec"]["command"]}
            yield from unequal(README, f"{probe} of {name}", given_options, options)


def _all() -> Iterator[tuple[Path, Manifests]]:
    """Yields the overlays for CPUs and GPUs, and the one that the README shows, each with where it is written."""
    for name, path in OVERLAYS.items():
        yield path, _secured() if name == "secured" else overlay(name)


@cache
def _secured() -> Manifests:
    """Returns the overlay that the README shows: the one for GPUs with TLS and tokens."""
    (block,) = re.findall(r"```yaml\n(# overlays/own/kustomization.yaml\n.*?)```", README.read_text(), re.DOTALL)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(shutil.copytree(DIRECTORY, Path(directory) / "kubernetes"))
        (copy / "overlays/own").mkdir()
        (copy / "overlays/own/kustomization.yaml").write_text(block)
        return rendered(copy / "overlays/own")


def _settings(manifests: Manifests, name: str) -> Any:
    """Returns the settings that the process gets from its environment."""
    return settings_from(manifests.environment(name), name)


def _volumes(manifests: Manifests, name: str) -> dict[str, Object]:
    return {volume["name"]: volume for volume in manifests.pod(name)["spec"]["volumes"]}


def _pods_metrics(manifests: Manifests, name: str) -> list[Object]:
    return [metric["pods"] for metric in manifests.of_kind("HorizontalPodAutoscaler")[name]["spec"]["metrics"]]


def _asked(probe: Object) -> tuple[str, int | str]:
    """Returns the health service or path that a probe asks for, and the port."""
    if "grpc" in probe:
        return probe["grpc"].get("service", ""), probe["grpc"]["port"]
    if "httpGet" in probe:
        return probe["httpGet"]["path"], probe["httpGet"]["port"]
    program, health, address, *options = probe["exec"]["command"]
    assert (program, health) == ("baton", "health") and address.startswith("--address="), probe
    asked = [option.removeprefix("--service=") for option in options if option.startswith("--service=")]
    return (asked or [""])[0], _port_of(address)


def _secrets_of_the_readme() -> dict[str, set[str]]:
    """Returns the Secrets that the README's commands make, with their keys."""
    made = re.findall(r"create secret generic (\S+) (.*)", README.read_text())
    return {
        name: {option.removeprefix("--from-file=").partition("=")[0] for option in options.split()}
        for name, options in made
    }


def _files_named(manifests: Manifests, name: str) -> set[str]:
    """Returns the files that the Deployment's settings and probes name."""
    commands = [manifests.container(name)[probe].get("exec", {}).get("command", []) for probe in PROBES]
    values = [*manifests.environment(name).values(), *(word.rpartition("=")[2] for words in commands for word in words)]
    return {value for value in values if value.startswith("/etc/baton/")}


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]
