"""Builds the images and runs the pods of deploy/kubernetes/overlays/cpu as Docker containers, as they are and then with
TLS and tokens: `make kubernetes-test`.

python -m tests.kubernetes

Needs a Docker engine and compose.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.compose.command import CommandFailed
from tests.compose.images import build
from tests.compose.project import Project
from tests.compose.report import Report, StepFailed, reported
from tests.kubernetes import checks
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.manifests import overlay, with_component
from tests.kubernetes.secrets import make_secrets

ROOT = Path(__file__).parents[2]
NAME = "baton-kubernetes"


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    return reported(_run)


def _run(report: Report) -> None:
    build(Project(name=NAME, directory=ROOT, files=("compose.cpu.yaml",), environment={}), report)
    with tempfile.TemporaryDirectory() as directory:
        secrets = make_secrets()
        plain = Cluster(NAME, overlay("cpu"), secrets=None)
        secured = Cluster(NAME, with_component("cpu", "secured", Path(directory) / "kubernetes"), secrets=secrets)
        try:
            _check(plain, report)
            _check(secured, report)
        finally:
            with report.step("everything removed"):
                plain.remove_volumes()


def _check(cluster: Cluster, report: Report) -> None:
    try:
        checks.start(cluster, report)
        checks.chat(cluster, report)
        checks.lose_prefill(cluster, report)
        checks.measure(cluster, report)
        checks.stop(cluster, report)
    except StepFailed:
        print(_logs(cluster))
        raise
    finally:
        cluster.remove()


def _logs(cluster: Cluster) -> str:
    try:
        return cluster.logs()
    except CommandFailed as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
