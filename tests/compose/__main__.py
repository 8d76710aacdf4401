"""Builds the images and runs the compose files for real: `make compose-test`.

python -m tests.compose

Needs a Docker engine, compose, openssl, and promtool of Prometheus.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from baton.free_ports import HeldPorts
from tests.compose import live_metrics, pair, two_hosts
from tests.compose.command import CommandFailed
from tests.compose.images import BUILT, build, third_parties
from tests.compose.project import Project
from tests.compose.report import Report, StepFailed, reported
from tests.compose.static_checks import check_compose_files, check_prometheus_files

ROOT = Path(__file__).parents[2]
NAME = "baton-test"


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    return reported(_run)


def _run(report: Report) -> None:
    project = Project(
        name=NAME,
        directory=ROOT,
        files=("compose.cpu.yaml",),
        # Four engines share this machine, and their answers are compared. In bfloat16 two logits are often equal, and
        # the batch then decides which one is chosen.
        environment={
            "GATEWAY_PORT": str(HeldPorts(1).numbers[0]),
            "BATON_DTYPE": "float32",
            "BATON_NUM_THREADS": "1",
            # The chats are short enough for decode to compute them, and the handoff is what is checked.
            "BATON_LOCAL_PREFILL_TOKENS": "0",
        },
    )
    check_prometheus_files(ROOT, report)
    check_compose_files(ROOT, report)
    build(project, report)
    others = third_parties(project, ROOT, report)
    project = replace(project, environment={**project.environment, **others.environment})
    services = (*BUILT, *others.services)
    try:
        pair.bring_up(project, services, report)
        pair.check_rights(project, report)
        pair.chat(project, report)
        pair.check_handoff(project, report)
        two_hosts.run_beside(project, ROOT, report)
        pair.scale(project, services, report)
        pair.have_all_serve(project, report)
        pair.check_handoff(project, report)
        prometheus = live_metrics.find_targets(project, {"prefill": 2, "decode": 2, "gateway": 1}, report)
        pair.kill_a_prefill(project, report)
        pair.have_all_serve(project, report)
        pair.check_handoff(project, report)
        live_metrics.list_panels(prometheus, ROOT / "deploy/grafana/dashboards", report)
        pair.stop(project, report)
    except StepFailed:
        print(_logs(project))
        raise
    finally:
        pair.tear_down(project, report)


def _logs(project: Project) -> str:
    try:
        return project.logs()
    except CommandFailed as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
