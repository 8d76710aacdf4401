"""Renders an overlay of deploy/kubernetes with kubectl's own kustomize, and looks its objects up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DIRECTORY = Path(__file__).parents[2] / "deploy/kubernetes"
KUBECTL = Path(sys.executable).with_name("kubectl")
_TIMEOUT_S = 30

Object = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """The objects of an overlay, as `kubectl apply -k` would send them."""

    objects: tuple[Object, ...]

    def of_kind(self, kind: str) -> dict[str, Object]:
        """Returns the objects of a kind by their names."""
        return {found["metadata"]["name"]: found for found in self.objects if found["kind"] == kind}

    def pod(self, name: str) -> Object:
        """Returns the pod's template in the Deployment `name`."""
        template: Object = self.of_kind("Deployment")[name]["spec"]["template"]
        return template

    def container(self, name: str) -> Object:
        """Returns the only container of the Deployment `name`."""
        (container,) = self.pod(name)["spec"]["containers"]
        found: Object = container
        return found

    def environment(self, name: str) -> dict[str, str]:
        """Returns the environment of the Deployment's container, without the variables whose Secret is optional."""
        found: dict[str, str] = {}
        for source in self.container(name)["envFrom"]:
            found |= self.of_kind("ConfigMap")[source["configMapRef"]["name"]]["data"]
        for variable in self.container(name).get("env", []):
            if "value" in variable:
                found[variable["name"]] = variable["value"]
            else:
                assert variable["valueFrom"]["secretKeyRef"]["optional"], variable
        return found

    def ports(self, name: str) -> dict[str, int]:
        """Returns the numbers of the container's ports by their names."""
        return {port["name"]: port["containerPort"] for port in self.container(name)["ports"]}


@cache
def overlay(name: str) -> Manifests:
    """Returns the objects of deploy/kubernetes/overlays/`name`."""
    return rendered(DIRECTORY / "overlays" / name)


def with_component(name: str, component: str, copy: Path) -> Manifests:
    """Returns the objects of an overlay with a component added. `copy` is a directory, not yet there, for a copy of
    deploy/kubernetes.
    """
    shutil.copytree(DIRECTORY, copy)
    own = copy / "overlays/own"
    own.mkdir()
    kustomization = {"resources": [f"../{name}"], "components": [f"../../components/{component}"]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return rendered(own)


def rendered(directory: Path) -> Manifests:
    """Returns the objects of the kustomization in a directory. Raises ValueError with what kustomize says if it refuses
    them.
    """
    done = subprocess.run(
        [KUBECTL, "kustomize", directory], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"{directory}: {done.stderr.strip()}")
    return Manifests(tuple(yaml.safe_load_all(done.stdout)))
