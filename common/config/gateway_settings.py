"""Every setting of the gateway, with its default and its range. docs/configuration.md explains them."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import model_validator

from common.config.fields import Address, Addresses, Choices, Origins, Positive, RequestBytes, Seconds, Targets
from common.config.process_settings import ProcessSettings


class GatewaySettings(ProcessSettings):
    """`decode` are the decode services it serves from, `metrics_targets` the services that its status page shows."""

    listen: Address = "127.0.0.1:8000"
    decode: Targets = ("127.0.0.1:50051",)
    decode_tls: bool = False
    decode_tls_ca: Path | None = None
    decode_tls_server_name: str | None = None
    decode_token_file: Path | None = None
    api_key_file: Path | None = None
    cors_origins: Origins = ()
    served_model_name: str = ""
    max_request_bytes: RequestBytes = 4 << 20
    max_open_requests: Positive = 512
    max_choices: Choices = 32
    request_timeout_s: Seconds | None = None
    admission_timeout_s: Seconds = 5.0
    resume_timeout_s: Seconds = 60.0
    client_stall_timeout_s: Seconds = 30.0
    status_page: bool = True
    status_needs_key: bool = False
    metrics_targets: Addresses = ()
    metrics_token_file: Path | None = None

    @model_validator(mode="after")
    def _check_decode(self) -> Self:
        if not self.decode:
            raise ValueError("decode names no address")
        if self.status_needs_key and self.api_key_file is None:
            raise ValueError("status_needs_key needs api_key_file")
        if len(self.decode) > 1 and any(target.startswith("dns:") for target in self.decode):
            raise ValueError("decode is one dns:///NAME:PORT, or any number of HOST:PORT")
        return self
