"""What every process of Baton is told: the two services and the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.config.fields import Address, NonNegativeSeconds, OptionalEndpoint, Ratio

ENV_PREFIX = "BATON_"
LogFormat = Literal["json", "console"]


class ProcessSettings(BaseSettings):
    """Where it listens, how it logs and traces, and how it ends."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True)

    config: Path | None = None
    listen: Address
    grace_period_s: NonNegativeSeconds = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "json"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    otlp_endpoint: OptionalEndpoint = ""
    trace_sample_ratio: Ratio = 1.0

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self
