"""Builds the Serve application: prefill, decode and gateway deployments, and the directory by which they find each
other.

`serve run` calls `build` with the `args` of the configuration file, and then applies the file's options of each
deployment, such as resources and autoscaling.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from baton.service_process import Role
from baton_ray.arguments import Args, settings_of
from baton_ray.directory import Announcement, Directory
from baton_ray.forwarding import Forwarder
from baton_ray.scaling import LOAD
from baton_ray.service import Service

START_TIMEOUT_S = 1800.0
"""How long a service may take to load its model."""
EXIT_S = 10.0
"""What a service needs at most to end after its grace period."""
DIRECTORY_TIMEOUT_S = 5.0
HEALTH_PERIOD_S = 2.0
_SERVICES: tuple[Role, ...] = ("prefill", "decode")


class DirectoryReplica:
    """The directory as a deployment, so that Serve starts it anew where it is lost."""

    def __init__(self) -> None:
        self._directory = Directory()

    async def exchange(self, announcement: Announcement, wanted: str) -> tuple[str, ...]:
        return self._directory.exchange(announcement, wanted)


class ServiceReplica:
    """One service. The requests and the KV of prefill and decode services come by gRPC, not through Serve."""

    def __init__(self, role: Role, flags: list[str], grace_period_s: float, directory: DeploymentHandle) -> None:
        def exchange(announcement: Announcement, wanted: str) -> Sequence[str]:
            asked = directory.exchange.remote(announcement, wanted)
            found: Sequence[str] = asked.result(timeout_s=DIRECTORY_TIMEOUT_S)
            return found

        if role != "gateway":
            # Ray sets it to the replica's num_cpus. Without it a service would compute on all cores of the node.
            os.environ.setdefault("BATON_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
        context = ray.get_runtime_context()
        self._service = Service(
            role=role,
            name=serve.get_replica_context().replica_id.unique_id,
            host="127.0.0.1" if role == "gateway" else ray.util.get_node_ip_address(),
            flags=flags,
            log_dir=Path(context.get_temp_dir(), context.get_session_name(), "logs"),
            exchange=exchange,
            start_timeout_s=START_TIMEOUT_S,
            stop_timeout_s=grace_period_s + EXIT_S,
            token_file=None if role == "gateway" else settings_of(role, flags).auth_token_file,
        )
        self._service.start()

    def check_health(self) -> None:
        """Called by Serve again and again. After three errors it replaces this replica."""
        self._service.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {LOAD: self._service.load()}

    def __del__(self) -> None:
        """Called by Serve to stop the replica, when it has no open calls of Serve's any more, and then by Python."""
        self._service.stop()


class GatewayReplica(ServiceReplica):
    """One gateway. Serve's proxies receive the HTTP requests, and this replica forwards them to its process."""

    def __init__(
        self,
        flags: list[str],
        grace_period_s: float,
        directory: DeploymentHandle,
        services: Sequence[DeploymentHandle],
    ) -> None:
        # Serve deploys what its ingress is bound to; `services` are there for that only.
        super().__init__("gateway", flags, grace_period_s, directory)
        self._forwarder = Forwarder(self._service.address)

    async def __call__(self, request: Request) -> Response:
        return await self._forwarder.forward(request)


def build(args: dict[str, Any]) -> Application:
    """Builds the application. Raises an error that names the key for arguments that are wrong."""
    asked = Args.model_validate(args)
    directory = serve.deployment(
        DirectoryReplica,
        name="directory",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1000,
        logging_config={"enable_access_log": False},  # every service asks every second
    ).bind()
    services = [_service(role, asked.flags(role), directory) for role in _SERVICES]
    flags = asked.flags("gateway")
    settings = settings_of("gateway", flags)
    return serve.deployment(
        GatewayReplica,
        name="gateway",
        # The gateway itself refuses what is too much, in the words of its API.
        max_ongoing_requests=2 * settings.max_open_requests,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=settings.grace_period_s + 2 * EXIT_S,
    ).bind(flags, settings.grace_period_s, directory, services)


def _service(role: Role, flags: list[str], directory: Application) -> Application:
    settings = settings_of(role, flags)
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": settings.tensor_parallel}}
    if settings.tensor_parallel > 1:
        # The ranks are processes of one service on one node, so their resources are one bundle.
        options["placement_group_bundles"] = [{"CPU": settings.tensor_parallel}]
        options["placement_group_strategy"] = "STRICT_PACK"
    return serve.deployment(
        ServiceReplica,
        name=role,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=settings.grace_period_s + 2 * EXIT_S,
        **options,
    ).bind(role, flags, settings.grace_period_s, directory)
