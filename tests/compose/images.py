"""The images of a run: built here, or pulled if a registry answers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.compose.command import run, succeeds
from tests.compose.project import Project
from tests.compose.report import Report

BUILT = ("prefill", "decode", "gateway")
_PULLED = ("prometheus", "grafana")
_BUILD_TIMEOUT_S = 2400
_PULL_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True)
class ThirdParties:
    """Settings that name the images of other projects, and the services whose image is available."""

    environment: dict[str, str]
    services: tuple[str, ...]


def build(project: Project, report: Report) -> None:
    for service in BUILT:
        with report.step(f"build {service}"):
            project.compose("build", service, timeout_s=_BUILD_TIMEOUT_S)
            report.note(f"{num_bytes(image_of(project, service)) / 1e6:,.0f} MB")


def image_of(project: Project, service: str) -> str:
    """Returns the image that the compose file names, with its variables filled in."""
    return str(yaml.safe_load(project.compose("config", timeout_s=60))["services"][service]["image"])


def third_parties(project: Project, root: Path, report: Report) -> ThirdParties:
    """Pulls Prometheus and Grafana. If no registry answers, builds Prometheus from Debian's packages and leaves Grafana
    out.
    """
    with report.step("images of Prometheus and Grafana"):
        if all(succeeds(["docker", "pull", image_of(project, name)], timeout_s=_PULL_TIMEOUT_S) for name in _PULLED):
            return ThirdParties(environment={}, services=_PULLED)
        report.note("no registry answers: Prometheus from Debian's packages, no Grafana")
        tag = "baton-test-prometheus"
        directory = str(root / "tests/compose/prometheus")
        arguments = ["--build-arg", f"BASE={os.environ['BASE_IMAGE']}"] if os.environ.get("BASE_IMAGE") else []
        network = ["--network", os.environ.get("BUILD_NETWORK") or "default"]
        run(["docker", "build", *network, *arguments, "--tag", tag, directory], timeout_s=_BUILD_TIMEOUT_S)
        return ThirdParties(environment={"PROMETHEUS_IMAGE": tag}, services=("prometheus",))


def num_bytes(image: str) -> int:
    return int(run(["docker", "image", "inspect", "--format", "{{.Size}}", image], timeout_s=30))
