"""Builds the Serve application: prefill, decode and gateway deployments, and the directory by which they find each
other.

`serve run` calls `build` with the `args` of the configuration file, and then applies the file's options of each
deployment, such as resources and autoscaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from baton.service_process import ProcessRole
from baton_ray.arguments import (
    EXIT_S,
    Args,
    directory_options,
    gateway_options,
    replica_flags,
    service_options,
    settings_of,
)
from baton_ray.forwarding import Forwarder
from baton_ray.scaling import LOAD
from baton_ray.service import EXCHANGE_TIMEOUT_S, Announcement, Directory, Service

START_TIMEOUT_S = 1800.0
"""How long a service may take to load its model."""
_SERVICES: tuple[ProcessRole, ...] = ("prefill", "decode")


class DirectoryReplica:
    """The directory as a deployment, so that Serve restarts it after a failure."""

    def __init__(self) -> None:
        self._directory = Directory()

    async def exchange(self, announcement: Announcement, wanted: str) -> tuple[str, ...]:
        return self._directory.exchange(announcement, wanted)


class ServiceReplica:
    """One service. The requests and the KV of prefill and decode services come by gRPC, not through Serve."""

    def __init__(self, role: ProcessRole, flags: list[str], directory: DeploymentHandle) -> None:
        def exchange(announcement: Announcement, wanted: str) -> Sequence[str]:
            asked = directory.exchange.remote(announcement, wanted)
            found: Sequence[str] = asked.result(timeout_s=EXCHANGE_TIMEOUT_S)
            return found

        context = ray.get_runtime_context()
        settings = settings_of(role, flags)  # again, because the environment differs from node to node
        is_gateway = role == "gateway"
        self._service = Service(
            role=role,
            name=serve.get_replica_context().replica_id.unique_id,
            host="127.0.0.1" if is_gateway else ray.util.get_node_ip_address(),
            flags=flags if is_gateway else [*flags, *replica_flags(settings, context.get_assigned_resources())],
            log_dir=Path(context.get_temp_dir(), context.get_session_name(), "logs"),
            exchange=exchange,
            start_timeout_s=START_TIMEOUT_S,
            stop_timeout_s=settings.grace_period_s + EXIT_S,
            token_file=None if is_gateway else settings.auth_token_file,
        )
        self._service.start()

    def check_health(self) -> None:
        """Serve calls this repeatedly, and replaces the replica after three errors."""
        self._service.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {LOAD: self._service.load()}

    def __del__(self) -> None:
        """Called by Serve to stop the replica once none of Serve's calls is open, and again by Python."""
        if hasattr(self, "_service"):  # its settings may have been refused
            self._service.stop()


class GatewayReplica(ServiceReplica):
    """One gateway. Serve's proxies receive the HTTP requests, and this replica forwards them to its process."""

    def __init__(self, flags: list[str], directory: DeploymentHandle, services: Sequence[DeploymentHandle]) -> None:
        # `services` is not used, but Serve deploys only what its ingress is bound to.
        super().__init__("gateway", flags, directory)
        self._forwarder = Forwarder(self._service.address)

    async def __call__(self, request: Request) -> Response:
        return await self._forwarder.forward(request)


def build(args: dict[str, Any]) -> Application:
    """Builds the application. Raises an error that names the wrong key."""
    asked = Args.model_validate(args)
    directory = serve.deployment(DirectoryReplica, **directory_options()).bind()
    services = [_service(role, asked.flags(role), directory) for role in _SERVICES]
    flags = asked.flags("gateway")
    options = gateway_options(settings_of("gateway", flags))
    return serve.deployment(GatewayReplica, **options).bind(flags, directory, services)


def _service(role: ProcessRole, flags: list[str], directory: Application) -> Application:
    options = service_options(settings_of(role, flags))
    return serve.deployment(ServiceReplica, **options).bind(role, flags, directory)
