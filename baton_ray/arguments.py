"""The arguments of the application, the settings of its services, and Serve's options of each deployment, as long as
the configuration file does not replace them. This module imports no Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from baton.service_process import TLS_SETTINGS, ProcessRole
from common.config.load import load_settings
from common.config.settings import DecodeSettings, GatewaySettings, PrefillSettings, ProcessSettings, ServiceSettings
from common.errors import ConfigError

EXIT_S = 10.0
"""A service ends within this many seconds after its grace period."""
HEALTH_PERIOD_S = 2.0
_KINDS: Mapping[ProcessRole, type[ProcessSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "gateway": GatewaySettings,
}
_WHY_NOT: Mapping[str, str] = {
    **dict.fromkeys(("listen", "prefill", "decode"), "the services find each other"),
    "config": "the settings stand in args",
    "log_format": "the replica reads the service's log",
    "other_role": "Serve scales each kind of service",
    **{name.removeprefix("BATON_").lower(): "the services use no TLS under Ray" for name in TLS_SETTINGS},
}
"""Why a setting cannot be set under Ray, be it in the arguments or in the environment."""


class Args(BaseModel):
    """The arguments of the application: settings of Baton, by the names that docs/configuration.md has.

    `services` has those that prefill and decode share, such as `model`.
    """

    model_config = ConfigDict(extra="forbid")

    services: dict[str, Any] = {}
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    gateway: dict[str, Any] = {}

    def flags(self, role: ProcessRole) -> list[str]:
        """Returns the flags of one kind of service. Raises ConfigError for a key that is unknown or refused."""
        given = _by_name(self.gateway) if role == "gateway" else _by_name(self.services) | _by_name(getattr(self, role))
        for name in given:
            if name not in _KINDS[role].model_fields:
                raise ConfigError(f"{role}: unknown key: {name}")
        _refuse(role, given)
        return [_flag(name, value) for name, value in given.items() if value is not None]


def settings_of(role: ProcessRole, flags: list[str]) -> Any:
    """Returns the settings that a service with these flags has in the environment of this process.

    Raises ConfigError, which names the key, for a setting that is wrong or may not be set.
    """
    settings = load_settings(_KINDS[role], flags, program=role, without=TLS_SETTINGS)
    _refuse(role, settings.model_fields_set)
    if settings.log_level not in ("debug", "info"):
        raise ConfigError(f"{role}: log_level cannot be {settings.log_level}, because a line of info says the port")
    return settings


def replica_flags(settings: ServiceSettings, assigned: Mapping[str, float]) -> list[str]:
    """Returns the flags of a service that follow from the resources that Ray has assigned to its replica.

    The service computes on as many threads as the replica has CPUs, unless `num_threads` is set. Without the flag it
    would use all cores of the node. Raises ConfigError if `device` is a GPU, and the replica has none, or too few for
    its ranks.
    """
    num_gpus, num_ranks = assigned.get("GPU", 0), settings.tensor_parallel
    if _is_on_gpu(settings) and (not num_gpus or num_gpus < num_ranks > 1):
        raise ConfigError(
            f"{settings.role}: device is {settings.device}, tensor_parallel {num_ranks}, and the replica has "
            f"{num_gpus:g} GPUs: set num_gpus in the ray_actor_options of this deployment, or leave them out"
        )
    if "num_threads" in settings.model_fields_set:
        return []
    return [_flag("num_threads", max(1, int(assigned.get("CPU", 0))))]


def _by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by the names of their settings. A key may have hyphens, as in Baton's own YAML files."""
    return {key.replace("-", "_"): value for key, value in given.items()}


def _refuse(role: ProcessRole, names: Collection[str]) -> None:
    for name, why in _WHY_NOT.items():
        if name in names:
            raise ConfigError(f"{role}: {name} cannot be set, because {why}")


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={','.join(map(str, value)) if isinstance(value, list) else value}"


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
    """Returns the options of prefill or decode: a CPU for each rank, and a GPU too if `device` is one."""
    num_gpus = settings.tensor_parallel if _is_on_gpu(settings) else 0
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


def _is_on_gpu(settings: ServiceSettings) -> bool:
    return settings.device.startswith("cuda")


def _lifetime(settings: ProcessSettings) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        # Serve kills a replica after this time, so the service must have ended by itself or been killed before.
        "graceful_shutdown_timeout_s": settings.grace_period_s + 2 * EXIT_S,
    }
