"""Checks of running pods: probes, a chat, the loss of prefill, memory, and the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time

from tests.compose.chats import question
from tests.compose.command import CommandFailed, wait_until
from tests.compose.doors import rows_served
from tests.compose.report import Report
from tests.kubernetes import probes
from tests.kubernetes.cluster import Cluster, quantity

_NUM_FILLINGS = 30
"""Sentences before the question, so many that decode does not compute the prompt itself."""
_CHAT_TIMEOUT_S = 120.0


def start(cluster: Cluster, report: Report) -> None:
    """Starts all pods at once, as Kubernetes does, those that need others first."""
    with report.step("start the gateway, decode and prefill, in this order"):
        for deployment in ("gateway", "decode", "prefill"):
            cluster.start(deployment)
        for deployment in ("gateway", "decode", "prefill"):
            _await(cluster, deployment, "startupProbe")
            report.expect(_passes(cluster, deployment, "livenessProbe"), f"{deployment} has started, and lives")
        for deployment in ("prefill", "decode", "gateway"):
            _await(cluster, deployment, "readinessProbe")
            report.note(f"{deployment} is ready")


def chat(cluster: Cluster, report: Report) -> None:
    with report.step("a chat through the gateway"):
        key = None if cluster.secrets is None else cluster.secrets["tokens"]["api-keys"].decode()
        num_before = rows_served(cluster.container("prefill"))
        status, answer = _ask(cluster, key)
        report.expect(status == 200, f"HTTP {status}: {answer[:60]!r} ...")
        num_served = rows_served(cluster.container("prefill")) - num_before
        report.expect(num_served == 1, f"prefill computed the prompts of {num_served} rows")
        if key is not None:
            status, _ = _ask(cluster, None)
            report.expect(status == 401, f"HTTP {status} without a key")


def lose_prefill(cluster: Cluster, report: Report) -> None:
    """Stops prefill and starts it again. Meanwhile decode must be alive and not ready."""
    with report.step("prefill gone, and back"):
        _stop(cluster, "prefill", report)
        wait_until("decode not ready", lambda: not _passes(cluster, "decode", "readinessProbe"), timeout_s=30)
        for deployment in ("decode", "gateway"):
            report.expect(_passes(cluster, deployment, "livenessProbe"), f"{deployment} lives without prefill")
        cluster.start("prefill")
        for deployment in ("prefill", "decode", "gateway"):
            _await(cluster, deployment, "startupProbe")
            _await(cluster, deployment, "readinessProbe")
    chat(cluster, report)


def measure(cluster: Cluster, report: Report) -> None:
    """Compares the most memory that each pod's process had with what the pod requests."""
    with report.step("memory"):
        for deployment in cluster.deployments:
            status = cluster.container(deployment).execute("cat", "/proc/1/status")
            (peak_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
            requested = quantity(cluster.manifests.container(deployment)["resources"]["requests"]["memory"])
            text = f"{deployment} had {peak_kib / 2**10:,.0f} MiB at most, of {requested / 2**20:,.0f} requested"
            report.expect(peak_kib * 2**10 <= requested, text)


def stop(cluster: Cluster, report: Report) -> None:
    with report.step("SIGTERM"):
        for deployment in ("gateway", "decode", "prefill"):
            _stop(cluster, deployment, report)


def _stop(cluster: Cluster, deployment: str, report: Report) -> None:
    container, grace_s = cluster.container(deployment), cluster.grace_s(deployment)
    begun_at_s = time.monotonic()
    container.stop(grace_s=grace_s)
    took_s = time.monotonic() - begun_at_s
    ended = f"{deployment} ended with status {container.exit_code} after {took_s:.1f} s of {grace_s}"
    report.expect(container.exit_code == 0 and took_s < grace_s, ended)


def _passes(cluster: Cluster, deployment: str, probe: str) -> bool:
    container = cluster.container(deployment)
    if container.inspect()["State"]["Status"] != "running":
        raise CommandFailed(f"{deployment} has ended")
    return probes.passes(
        cluster.manifests.container(deployment)[probe],
        container,
        address=cluster.address(deployment),
        ports=cluster.manifests.ports(deployment),
    )


def _await(cluster: Cluster, deployment: str, probe: str) -> None:
    """Waits for a probe, as long as the startup probe allows."""
    startup = cluster.manifests.container(deployment)["startupProbe"]
    timeout_s = startup["periodSeconds"] * startup["failureThreshold"]
    wait_until(f"{deployment}: {probe}", lambda: _passes(cluster, deployment, probe), timeout_s=timeout_s)


def _ask(cluster: Cluster, key: str | None) -> tuple[int, str]:
    """Returns the status and the text of a chat's answer."""
    messages = [{"role": "user", "content": question(time.monotonic_ns(), num_fillings=_NUM_FILLINGS)}]
    body = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    address, port = cluster.address("gateway"), cluster.manifests.ports("gateway")["http"]
    connection = http.client.HTTPConnection(address, port, timeout=_CHAT_TIMEOUT_S)
    if cluster.secrets is not None:
        context = ssl.create_default_context(cadata=cluster.secrets["gateway-tls"]["ca.crt"].decode())
        context.check_hostname = False  # the certificate is for the Service's name, and this is the pod's address
        connection = http.client.HTTPSConnection(address, port, timeout=_CHAT_TIMEOUT_S, context=context)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    if response.status != 200:
        return response.status, str(answer)
    return response.status, str(answer["choices"][0]["message"]["content"])
