"""Serve's options of each deployment, as long as the configuration file does not replace them.

They follow from the settings of the services. This module does without Ray.
"""

from __future__ import annotations

from typing import Any

from common.config.settings import GatewaySettings, ProcessSettings, ServiceSettings

EXIT_S = 10.0
"""A service ends within so many seconds after its grace period."""
HEALTH_PERIOD_S = 2.0


def directory_options() -> dict[str, Any]:
    return {
        "name": "directory",
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 1000,
        "logging_config": {"enable_access_log": False},  # every service asks every second
    }


def gateway_options(settings: GatewaySettings) -> dict[str, Any]:
    return {
        "name": "gateway",
        # The gateway itself refuses what is too much, in the words of its API.
        "max_ongoing_requests": 2 * settings.max_open_requests,
        **_lifetime(settings),
    }


def service_options(settings: ServiceSettings) -> dict[str, Any]:
    """Returns the options of prefill or decode: a CPU for each rank, and a GPU each if `device` is one."""
    num_gpus = settings.tensor_parallel if is_on_gpu(settings) else 0
    resources = {"num_cpus": settings.tensor_parallel, "num_gpus": num_gpus}
    options: dict[str, Any] = {
        "name": settings.role.value,
        "ray_actor_options": {name: number for name, number in resources.items() if number},
        **_lifetime(settings),
    }
    if settings.tensor_parallel > 1:
        # The ranks are processes of one service on one node, so their resources are one bundle.
        bundle = {"CPU": settings.tensor_parallel, "GPU": num_gpus}
        options["placement_group_bundles"] = [{name: number for name, number in bundle.items() if number}]
        options["placement_group_strategy"] = "STRICT_PACK"
    return options


def is_on_gpu(settings: ServiceSettings) -> bool:
    return settings.device.startswith("cuda")


def _lifetime(settings: ProcessSettings) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        # Serve kills a replica after this time, so the service must have ended by itself or been killed before.
        "graceful_shutdown_timeout_s": settings.grace_period_s + 2 * EXIT_S,
    }
