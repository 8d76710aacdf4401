"""Checks of the compose and Prometheus files without running them, with compose and promtool."""

from __future__ import annotations

from pathlib import Path

from tests.compose.command import run
from tests.compose.project import Project
from tests.compose.report import Report

_TIMEOUT_S = 120


def check_compose_files(root: Path, report: Report) -> None:
    """Has compose read every file. `python -m scripts.lint compose` checks what the files say."""
    read = [(root, ("compose.yaml",), ("replicas", "tracing")), (root, ("compose.cpu.yaml",), ("tracing",))]
    hosts = [root / "deploy/two-hosts" / host for host in ("prefill", "decode")]
    read += [(host, files, ()) for host in hosts for files in (("compose.yaml",), ("compose.yaml", "gpu.yaml"))]
    with report.step("compose files: docker compose config"):
        for directory, files, profiles in read:
            project = Project(name="baton-config", directory=directory, files=files, environment={})
            with_profiles = [part for profile in profiles for part in ("--profile", profile)]
            project.compose(*with_profiles, "config", timeout_s=_TIMEOUT_S)
            report.note(f"{directory.name} {' '.join(files)}: accepted")


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
