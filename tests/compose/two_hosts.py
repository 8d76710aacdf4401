"""Runs deploy/two-hosts as two compose projects that reach each other through this host's address, with certificates
for it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton import Client
from baton.client import Tls
from baton.errors import BatonError
from baton.free_ports import HeldPorts
from tests.compose.chats import over_grpc
from tests.compose.command import run
from tests.compose.doors import http, load
from tests.compose.images import image_of
from tests.compose.project import Project
from tests.compose.report import Report, StepFailed

_UP_TIMEOUT_S = 300
_NUM_CHATS = 4
_CONTAINERS_USER = 10001


def run_beside(pair: Project, root: Path, report: Report) -> None:
    """Runs both projects next to the running `pair`, with its images and weights."""
    (container,) = pair.containers("gateway")
    (network,) = container.inspect()["NetworkSettings"]["Networks"].values()
    host = network["Gateway"]
    with _certificates(root, host, image_of(pair, "gateway"), report) as tls:
        prefill, decode = _projects(pair, root, host, tls)
        try:
            _run(prefill, decode, tls, report)
        except StepFailed:
            print(prefill.logs(), decode.logs(), sep="\n")
            raise
        finally:
            with report.step("two hosts: down"):
                for project in (decode, prefill):
                    project.compose("down", "--timeout", "20", timeout_s=120)


def _run(prefill: Project, decode: Project, tls: Path, report: Report) -> None:
    address = prefill.environment["PREFILL_BIND"] + ":" + prefill.environment["PREFILL_PORT"]
    with report.step(f"two hosts: prefill on {address}, decode and gateway elsewhere, certificates between them"):
        prefill.compose("up", "--detach", "--no-build", timeout_s=_UP_TIMEOUT_S)
        decode.compose("up", "--detach", "--no-build", timeout_s=_UP_TIMEOUT_S)
        prefill.wait_healthy(["prefill"], timeout_s=_UP_TIMEOUT_S)
        decode.wait_healthy(["decode", "gateway"], timeout_s=_UP_TIMEOUT_S)
    with report.step("two hosts: who may call the prefill host"):
        ca = tls / "ca.pem"
        report.expect(not _answers(address, None), "not who speaks plain text")
        report.expect(not _answers(address, Tls(ca_file=ca)), "not who has no certificate")
        own = Tls(ca_file=ca, cert_file=tls / "decode/cert.pem", key_file=tls / "decode/key.pem")
        report.expect(_answers(address, own), "who has one of this authority's")
    with report.step("two hosts: chats through gateway and gRPC"):
        (container,) = decode.containers("decode")
        grpc = over_grpc([f"localhost:{container.port(50051)}"], tls=Tls(ca_file=ca))
        load(http(decode), grpc, num_requests=_NUM_CHATS, report=report)


def _answers(address: str, tls: Tls | None) -> bool:
    try:
        with Client(address, tls=tls, rpc_timeout_s=3.0) as client:
            client.health()
    except BatonError:
        return False
    return True


def _projects(pair: Project, root: Path, host: str, tls: Path) -> tuple[Project, Project]:
    port = str(HeldPorts(1).numbers[0])
    shared = {
        "BATON_DEVICE": "cpu",
        "BATON_NUM_THREADS": "1",
        "BATON_LOCAL_PREFILL_TOKENS": pair.environment["BATON_LOCAL_PREFILL_TOKENS"],
        "METRICS_PORT": "",
        "WEIGHTS_VOLUME": f"{pair.name}_weights",
        **{f"{name.upper()}_IMAGE": image_of(pair, name) for name in ("prefill", "decode", "gateway")},
    }
    own = {
        "prefill": {"PREFILL_BIND": host, "PREFILL_PORT": port},
        "decode": {"PREFILL": f"{host}:{port}", "GATEWAY_PORT": str(HeldPorts(1).numbers[0])},
    }
    prefill, decode = (
        Project(
            name=f"{pair.name}-{role}-host",
            directory=root / "deploy/two-hosts" / role,
            files=("compose.yaml",),
            environment={**shared, **environment, "TLS_DIRECTORY": str(tls / role)},
        )
        for role, environment in own.items()
    )
    return prefill, decode


@contextmanager
def _certificates(root: Path, host: str, image: str, report: Report) -> Iterator[Path]:
    """Makes certificates by the README's first two steps, with `host` at both ends.

    A container changes their owner, so this process needs no root.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        script = shutil.copy(root / "deploy/two-hosts/make_certificates.sh", directory)
        tls = directory / "tls"
        with report.step("two hosts: make_certificates.sh"):
            run([script, host, host], timeout_s=60)
            hosts = [str(tls / role) for role in ("prefill", "decode")]
            _change_owner(_CONTAINERS_USER, hosts, tls, image)
        try:
            yield tls
        finally:
            _change_owner(tls.stat().st_uid, hosts, tls, image)


def _change_owner(user: int, directories: list[str], mount: Path, image: str) -> None:
    command = ["docker", "run", "--rm", "--user", "0", "--volume", f"{mount}:{mount}", image]
    run([*command, "chown", "-R", str(user), *directories], timeout_s=60)
