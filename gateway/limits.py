"""Limits on the time and memory that one HTTP client can take."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.gateway_settings import GatewaySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The limits of a connection.

    head          must be complete `head_timeout_s` after its first byte; the first head of a connection,
                  `head_timeout_s` after the connection was opened (with TLS: after the handshake)
    body          must be complete `body_timeout_s` after the head; after the first `body_grace_s` it must come at
                  `min_body_rate` bytes a second or more, measured over `body_window_s`
    no request    the connection is closed after `keep_alive_s`
    no reading    a client that reads nothing of a pending answer for `client_stall_timeout_s` is dropped
    """

    max_request_bytes: int
    max_choices: int
    request_timeout_s: float | None
    client_stall_timeout_s: float
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    body_grace_s: float = 15.0
    body_window_s: float = 5.0
    min_body_rate: int = 1024
    keep_alive_s: int = 75
    max_head_bytes: int = 32 << 10

    @classmethod
    def of(cls, settings: GatewaySettings) -> HttpLimits:
        return cls(
            max_request_bytes=settings.max_request_bytes,
            max_choices=settings.max_choices,
            request_timeout_s=settings.request_timeout_s,
            client_stall_timeout_s=settings.client_stall_timeout_s,
        )
