"""Opens the client that the gateway uses to call the decode services."""

from __future__ import annotations

import structlog

from baton import AsyncClient, Tls
from baton.errors import InvalidArgument, Unavailable
from common.addresses import is_loopback
from common.config.settings import GatewaySettings
from common.errors import ConfigError, StartupError
from common.rpc.bearer_tokens import read_tokens

RPC_TIMEOUT_S = 5.0
_TLS_FILES = ("ca_file", "cert_file", "key_file")

_log = structlog.get_logger(__name__)


def open_decode_client(settings: GatewaySettings) -> AsyncClient:
    """Opens the client. Call it in a running event loop.

    Raises ConfigError, which names the setting, or StartupError if no host name can be resolved.
    """
    token = decode_token(settings)
    if token is not None and not settings.decode_tls and not all(map(is_loopback, settings.decode)):
        _log.warning("tokens_in_plain_text", decode=settings.decode)
    try:
        return AsyncClient(
            ",".join(settings.decode),
            tls=decode_tls(settings),
            token=token,
            rpc_timeout_s=RPC_TIMEOUT_S,
            resume=True,
            resume_timeout_s=settings.resume_timeout_s,
            admission_timeout_s=settings.admission_timeout_s,
        )
    except InvalidArgument as error:
        setting = "decode_tls" if error.field in _TLS_FILES else "decode"
        raise ConfigError(f"{setting}: {error}") from error
    except Unavailable as error:
        raise StartupError(f"decode: {error}") from error


def decode_token(settings: GatewaySettings) -> str | None:
    """Reads the token that authenticates the gateway to the decode services.

    Returns None if no token file is configured. Raises ConfigError for an empty file.
    """
    if settings.decode_token_file is None:
        return None
    return read_tokens("decode_token_file", settings.decode_token_file)[0]


def decode_tls(settings: GatewaySettings) -> Tls | None:
    if not settings.decode_tls:
        return None
    return Tls(
        ca_file=settings.decode_tls_ca,
        cert_file=settings.tls_cert,
        key_file=settings.tls_key,
        server_name=settings.decode_tls_server_name,
    )
