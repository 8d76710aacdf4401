"""Settings that all processes of Baton share: the two services and the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.config.fields import Address, NonNegativeSeconds, OptionalEndpoint, Ratio

ENV_PREFIX = "BATON_"
LogFormat = Literal["json", "console"]


class ProcessSettings(BaseSettings):
    """Settings of any process: where it listens, how it logs and traces, and how it ends."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_ignore_empty=True, use_attribute_docstrings=True
    )
    example: ClassVar[str]
    """Example flags with which the service starts, shown by `--help`."""

    config: Path | None = None
    """YAML file that may set any of these keys."""
    listen: Address
    """HOST:PORT to listen on."""
    grace_period_s: NonNegativeSeconds = 30.0
    """How long running requests may take to finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log lines below this level are not written."""
    log_format: LogFormat = "json"
    """Format of the log on stderr: JSON objects, or text for people."""
    tls_cert: Path | None = None
    """PEM file of the server's certificate; with tls_key, the server uses TLS."""
    tls_key: Path | None = None
    """PEM file of the private key of tls_cert."""
    otlp_endpoint: OptionalEndpoint = ""
    """http://HOST:PORT or https://HOST:PORT of an OTLP collector for traces; unset: there is no tracing."""
    trace_sample_ratio: Ratio = 1.0
    """With otlp_endpoint: the share of requests to trace, of those that bring no trace context, 0 to 1."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self
