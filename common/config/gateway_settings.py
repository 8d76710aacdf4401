"""All settings of the gateway, with their defaults and ranges. docs/configuration.md explains them."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import model_validator

from common.addresses import is_name
from common.config.fields import Address, Addresses, Choices, Names, Origins, Positive, RequestBytes, Seconds, Targets
from common.config.process_settings import ProcessSettings


class GatewaySettings(ProcessSettings):
    """The gateway's settings. The gateway forwards requests to the services in `decode`, and its status page shows
    the metrics of `metrics_targets`.
    """

    example = "--listen 127.0.0.1:8000 --decode 127.0.0.1:50051"

    listen: Address = "127.0.0.1:8000"
    """HOST:PORT to listen on."""
    decode: Targets = ("127.0.0.1:50051",)
    """HOST:PORT of each decode service, with commas, or one dns:///NAME:PORT or file:///PATH for all behind it."""
    decode_tls: bool = False
    """Connects to the decode services with TLS."""
    decode_tls_ca: Path | None = None
    """PEM file of the authority that signed the decode services' certificates; unset: the system's authorities."""
    decode_tls_server_name: str | None = None
    """Host name in the decode services' certificates; unset: the address's host."""
    decode_token_file: Path | None = None
    """File whose first token is sent to the decode services."""
    api_key_file: Path | None = None
    """File of keys, one per line; HTTP clients must then send one."""
    cors_origins: Origins = ()
    """Web origins whose pages may call the gateway from a browser, with commas; * for all."""
    allowed_hosts: Names = ()
    """Hosts that requests may name, with commas; * for any. Unset: any, on loopback without keys this machine's."""
    served_model_name: Names = ()
    """Names of the model in the HTTP API, with commas; answers have the first. Unset: what decode calls it."""
    max_request_bytes: RequestBytes = 4 << 20
    """Most bytes of one request, 64 KiB to 16 MiB."""
    max_open_requests: Positive = 512
    """Most open requests at a time, of all clients together."""
    max_choices: Choices = 32
    """Most choices of one request, n for each of its prompts, 1 to 128."""
    request_timeout_s: Seconds | None = None
    """Deadline of a request; unset: none."""
    admission_timeout_s: Seconds = 5.0
    """How long the gateway tries to find a decode service that accepts a request."""
    resume_timeout_s: Seconds = 60.0
    """How long the gateway tries to find a decode service that continues a broken stream."""
    client_stall_timeout_s: Seconds = 30.0
    """A client that reads nothing for this long is dropped."""
    status_page: bool = True
    """Serves the status page at /."""
    status_needs_key: bool = False
    """With api_key_file: the status page and metrics need a key too."""
    metrics_targets: Addresses = ()
    """HOST:PORT of the metrics of each service that the status page shows, with commas."""
    metrics_token_file: Path | None = None
    """File whose first token is sent to metrics_targets."""

    @model_validator(mode="after")
    def _check_decode(self) -> Self:
        if not self.decode:
            raise ValueError("decode names no address")
        if self.status_needs_key and self.api_key_file is None:
            raise ValueError("status_needs_key needs api_key_file")
        if len(self.decode) > 1 and any(map(is_name, self.decode)):
            raise ValueError("decode is one dns:///NAME:PORT or file:///PATH, or any number of HOST:PORT")
        return self
