"""Checks of the compose and Prometheus files without running them, with compose and promtool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.compose.command import run
from tests.compose.project import Project
from tests.compose.report import Report

_TIMEOUT_S = 120


def check_compose_files(root: Path, report: Report) -> None:
    with report.step("compose files: docker compose config"):
        for file, profiles in (("compose.yaml", ("replicas", "tracing")), ("compose.cpu.yaml", ("tracing",))):
            project = Project(name="baton-config", directory=root, files=(file,), environment={})
            with_profiles = [part for profile in profiles for part in ("--profile", profile)]
            services = yaml.safe_load(project.compose(*with_profiles, "config", timeout_s=_TIMEOUT_S))["services"]
            report.note(f"{file}: {', '.join(services)}")
            devices = {name: _device_ids(service) for name, service in services.items()}
            reserved = {name: ids for name, ids in devices.items() if ids}
            if file == "compose.yaml":
                expected = {"prefill": ["0"], "decode": ["1"], "prefill-2": ["2"], "decode-2": ["3"]}
                report.expect(reserved == expected, f"GPUs reserved: {expected}")
            else:
                report.expect(reserved == {}, "no GPU is reserved for the CPU file")
        for host in ("prefill", "decode"):
            for files in (("compose.yaml",), ("compose.yaml", "gpu.yaml")):
                directory = root / "deploy/two-hosts" / host
                project = Project(name="baton-config", directory=directory, files=files, environment={})
                services = yaml.safe_load(project.compose("config", timeout_s=_TIMEOUT_S))["services"]
                report.note(f"two-hosts/{host} {' '.join(files)}: {', '.join(services)}")
                ids = _device_ids(services[host])
                report.expect(bool(ids) == ("gpu.yaml" in files), f"GPUs reserved: {ids or 'none'}")


def check_prometheus_files(root: Path, report: Report) -> None:
    directory = root / "deploy/prometheus"
    with report.step("Prometheus' configuration and rules: promtool"):
        for arguments in (
            ("check", "config", "prometheus.yml"),
            ("check", "rules", "rules.yml"),
            ("test", "rules", "rules_test.yml"),
        ):
            run(["promtool", *arguments], timeout_s=_TIMEOUT_S, directory=directory)
            report.note(f"promtool {' '.join(arguments)}: accepted")


def _device_ids(service: dict[str, Any]) -> list[str]:
    reservations = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    return [str(id) for device in reservations.get("devices", []) for id in device["device_ids"]]
