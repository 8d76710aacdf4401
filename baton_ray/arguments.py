"""The arguments of the application, and the settings of its services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from baton.service_process import TLS_SETTINGS, Role
from common.config.gateway_settings import GatewaySettings
from common.config.load import load_settings
from common.config.process_settings import ProcessSettings
from common.config.settings import DecodeSettings, PrefillSettings

_KINDS: Mapping[Role, type[ProcessSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "gateway": GatewaySettings,
}
_WHY_NOT: Mapping[str, str] = {
    **dict.fromkeys(("listen", "prefill", "decode"), "the services find each other"),
    "log_format": "the replica reads the service's log",
    "other_role": "Serve scales each kind of service",
    **{name.removeprefix("BATON_").lower(): "the services use no TLS under Ray" for name in TLS_SETTINGS},
}
"""Why a setting cannot be set under Ray."""


class Args(BaseModel):
    """The arguments of the application: settings of Baton, by the names that docs/configuration.md has.

    Those in `services` are for prefill and decode both, as the model is.
    """

    model_config = ConfigDict(extra="forbid")

    services: dict[str, Any] = {}
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    gateway: dict[str, Any] = {}

    def flags(self, role: Role) -> list[str]:
        """Returns the flags of one kind of service. Raises ValueError for a key that may not be set here."""
        settings = self.gateway if role == "gateway" else {**self.services, **getattr(self, role)}
        for key in settings:
            if key in _WHY_NOT:
                raise ValueError(f"{role}: {key} cannot be set, because {_WHY_NOT[key]}")
        return [_flag(key.replace("_", "-"), value) for key, value in settings.items() if value is not None]


def settings_of(role: Role, flags: list[str]) -> Any:
    """Returns the settings that a service with these flags has. Raises ConfigError, which names the key."""
    return load_settings(_KINDS[role], flags, program=role, without=TLS_SETTINGS)


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
