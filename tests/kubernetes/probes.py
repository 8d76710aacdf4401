"""Asks a pod's probes as the kubelet does: from outside the container, except commands."""

from __future__ import annotations

import contextlib
import http.client
import ssl

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.compose.command import succeeds
from tests.compose.project import Container
from tests.kubernetes.manifests import Object


def passes(probe: Object, container: Container, *, address: str, ports: dict[str, int]) -> bool:
    """Asks the probe once, within its timeout."""
    timeout_s = probe["timeoutSeconds"]
    if "grpc" in probe:
        return _serves(f"{address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""), timeout_s)
    if "httpGet" in probe:
        asked = probe["httpGet"]
        return _answers(address, ports[asked["port"]], asked["path"], asked.get("scheme", "HTTP"), timeout_s)
    return succeeds(["docker", "exec", container.id, *probe["exec"]["command"]], timeout_s=timeout_s)


def _serves(address: str, service: str, timeout_s: float) -> bool:
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False


def _answers(address: str, port: int, path: str, scheme: str, timeout_s: float) -> bool:
    if scheme == "HTTPS":
        # The kubelet does not check certificates.
        context = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address, port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        return 200 <= connection.getresponse().status < 400
    return False
