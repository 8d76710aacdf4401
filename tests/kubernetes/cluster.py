"""Runs the pods of rendered manifests as Docker containers: one container for each Deployment, on one network.

Docker gets from the manifests what the kubelet and the container runtime would: environment, user, groups, rights,
limits, volumes and grace periods. A field of a pod that is neither translated nor known to mean nothing here is
refused, so nothing of the manifests goes unnoticed. NetworkPolicies are not enforced.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from tests.compose.command import run, succeeds
from tests.compose.project import Container
from tests.kubernetes.manifests import Manifests, Object
from tests.kubernetes.secrets import Secrets

_TIMEOUT_S = 60
_TRANSLATED = {
    "pod": {"containers", "securityContext", "terminationGracePeriodSeconds", "volumes"},
    "container": {"name", "image", "envFrom", "env", "ports", "resources", "securityContext", "volumeMounts"}
    | {"startupProbe", "livenessProbe", "readinessProbe"},
    "securityContext of the pod": {"runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "seccompProfile"},
    "securityContext": {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"},
}
_WITHOUT_MEANING_HERE = {
    # Docker adds no service account and no variables of other services.
    "automountServiceAccountToken",
    "enableServiceLinks",
    "fsGroupChangePolicy",
    "imagePullPolicy",
    # One node, and nobody who is still sent connections.
    "topologySpreadConstraints",
    "lifecycle",
}
_UNITS = {"": 1, "m": 1e-3, "Mi": 2**20, "Gi": 2**30}


class Cluster:
    """The pods of `manifests`. `secrets` has the content of their Secrets, or is None if they need none. Clusters of
    the same name share the volume of weights.
    """

    def __init__(self, name: str, manifests: Manifests, *, secrets: Secrets | None) -> None:
        self.name = name
        self.manifests = manifests
        self.secrets = secrets
        self._containers: dict[str, Container] = {}

    @property
    def deployments(self) -> tuple[str, ...]:
        return tuple(self.manifests.of_kind("Deployment"))

    def container(self, deployment: str) -> Container:
        return self._containers[deployment]

    def address(self, deployment: str) -> str:
        """Returns the address of the Deployment's only pod."""
        (network,) = self.container(deployment).inspect()["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def grace_s(self, deployment: str) -> int:
        return int(self.manifests.pod(deployment)["spec"]["terminationGracePeriodSeconds"])

    def start(self, deployment: str) -> None:
        """Starts the Deployment's pod. An earlier one is removed."""
        if not succeeds(["docker", "network", "inspect", self.name], timeout_s=_TIMEOUT_S):
            run(["docker", "network", "create", self.name], timeout_s=_TIMEOUT_S)
        name = f"{self.name}-{deployment}"
        run(["docker", "rm", "--force", name], timeout_s=_TIMEOUT_S)
        command = ["docker", "run", "--detach", "--name", name, *self._arguments(deployment)]
        self._containers[deployment] = Container(run(command, timeout_s=_TIMEOUT_S).strip())

    def logs(self) -> str:
        shown = [
            run(["sh", "-c", f"docker logs --tail 15 {container.id} 2>&1"], timeout_s=_TIMEOUT_S)
            for container in self._containers.values()
        ]
        return "\n".join(shown)

    def remove(self) -> None:
        """Removes the containers, and the network if there is one. Volumes stay."""
        for container in self._containers.values():
            run(["docker", "rm", "--force", container.id], timeout_s=_TIMEOUT_S)
        self._containers.clear()
        succeeds(["docker", "network", "rm", self.name], timeout_s=_TIMEOUT_S)

    def remove_volumes(self) -> None:
        named = ["--quiet", "--filter", f"name=^{self.name}-"]
        for volume in run(["docker", "volume", "ls", *named], timeout_s=_TIMEOUT_S).split():
            run(["docker", "volume", "rm", volume], timeout_s=_TIMEOUT_S)

    def _arguments(self, deployment: str) -> list[str]:
        spec, container = self.manifests.pod(deployment)["spec"], self.manifests.container(deployment)
        user, rights = spec["securityContext"], container["securityContext"]
        _check_fields("pod", spec)
        _check_fields("container", container)
        _check_fields("securityContext of the pod", user)
        _check_fields("securityContext", rights)
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}, "Docker's default profile is the runtime's"
        assert user["runAsNonRoot"] is True and user["runAsUser"] != 0
        assert rights["readOnlyRootFilesystem"] is True and rights["allowPrivilegeEscalation"] is False
        memory, cpu = (container["resources"]["limits"].get(kind) for kind in ("memory", "cpu"))
        return [
            # The Service's name, which headless ones resolve to the pods.
            *("--network", self.name, "--network-alias", deployment),
            *("--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(user["fsGroup"])),
            # Kubernetes asks its own probes, not those of the image.
            "--no-healthcheck",
            *("--read-only", "--security-opt", "no-new-privileges:true"),
            *(part for capability in rights["capabilities"]["drop"] for part in ("--cap-drop", capability)),
            *("--memory", str(int(quantity(memory))), "--memory-swap", str(int(quantity(memory)))),
            *(("--cpus", str(quantity(cpu))) if cpu else ()),
            *(part for item in self.manifests.environment(deployment).items() for part in ("--env", "=".join(item))),
            *self._mounts(deployment),
            container["image"],
        ]

    def _mounts(self, deployment: str) -> Iterator[str]:
        spec = self.manifests.pod(deployment)["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        group = spec["securityContext"]["fsGroup"]
        for mount in self.manifests.container(deployment)["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            yield "--mount"
            if "emptyDir" in volume:
                size = int(quantity(volume["emptyDir"]["sizeLimit"]))
                assert volume["emptyDir"]["medium"] == "Memory"
                yield f"type=tmpfs,destination={path},tmpfs-size={size},tmpfs-mode=1777"
            elif "persistentVolumeClaim" in volume:
                source = f"{self.name}-{volume['persistentVolumeClaim']['claimName']}"
                self._make_volume(source, {}, group=group, mode="2770")
                yield f"type=volume,source={source},destination={path},volume-nocopy"
            else:
                source = f"{self.name}-{deployment}-{mount['name']}"
                self._make_volume(source, self._content(volume["secret"]), group=group, mode="0750")
                yield f"type=volume,source={source},destination={path},volume-nocopy" + ",readonly" * mount["readOnly"]

    def _content(self, secret: Object) -> dict[str, bytes]:
        assert self.secrets is not None
        keys = self.secrets[secret["secretName"]]
        items = secret.get("items", [{"key": key, "path": key} for key in keys])
        return {item["path"]: keys[item["key"]] for item in items}

    def _make_volume(self, volume: str, files: dict[str, bytes], *, group: int, mode: str) -> None:
        """Makes a volume as the kubelet hands it over: of root, and with `fsGroup` readable by that group."""
        with tempfile.TemporaryDirectory() as directory:
            for name, content in files.items():
                (Path(directory) / name).write_bytes(content)
            copy = "cp /from/* /to && chmod 0440 /to/*; " if files else ""
            script = f"{copy}chown -R :{group} /to && chmod {mode} /to"
            target = ["--mount", f"type=volume,source={volume},destination=/to,volume-nocopy"]
            command = ["--user", "0", *target, "--volume", f"{directory}:/from:ro", self._image, "sh", "-c", script]
            run(["docker", "run", "--rm", *command], timeout_s=_TIMEOUT_S)

    @cached_property
    def _image(self) -> str:
        """An image with a shell."""
        return str(self.manifests.container("gateway")["image"])


def quantity(text: str) -> float:
    """Returns the number that a quantity of Kubernetes says: "100m", "2", "4Gi"."""
    found = re.fullmatch(r"(\d+)(\w*)", text)
    assert found is not None and found[2] in _UNITS, text
    return int(found[1]) * _UNITS[found[2]]


def _check_fields(kind: str, fields: Object) -> None:
    unknown = set(fields) - _TRANSLATED[kind] - _WITHOUT_MEANING_HERE
    assert not unknown, f"{kind}: {', '.join(sorted(unknown))} is not translated"
