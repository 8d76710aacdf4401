"""Tokens that a caller shows as `authorization: Bearer <token>`, and the check of them."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from common.errors import ConfigError, Unauthenticated
from common.rpc_errors import abort_with
from common.rpc_requests import Context, Continuation
from common.wire.grpc_options import Metadata

_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_SCHEME = "Bearer "


def read_tokens(setting: str, path: Path) -> tuple[str, ...]:
    """The tokens in a file, one a line. Raises ConfigError naming `setting`, and never quotes what was read."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"{setting}: {path}: {reason}") from None
    tokens = tuple(line.strip() for line in lines if line.strip())
    if not tokens:
        raise ConfigError(f"{setting}: {path}: holds no token")
    for number, token in enumerate(tokens, start=1):
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"{setting}: {path}: token {number} has characters other than printable ASCII")
    return tokens


def authorization(token: str) -> Metadata:
    """The metadata that shows `token`."""
    return (("authorization", f"{_SCHEME}{token}"),)


class TokenCheck(grpc.aio.ServerInterceptor):
    """Calls without one of `tokens` are UNAUTHENTICATED before anything of them is read; health is open to all."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._expected = [f"{_SCHEME}{token}".encode() for token in tokens]

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if str(handler_call_details.method).startswith(_OPEN_SERVICES):
            return await continuation(handler_call_details)
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"]
        if len(shown) == 1 and self._is_known(shown[0]):
            return await continuation(handler_call_details)
        return _refuse_without_token if not shown else _refuse_unknown_token

    def _is_known(self, shown: str | bytes) -> bool:
        """Takes the same time whichever token it is, and however much of one is right."""
        shown_bytes = shown.encode(errors="replace") if isinstance(shown, str) else shown
        matches = [hmac.compare_digest(shown_bytes, expected) for expected in self._expected]
        return any(matches)


def _refusal(message: str) -> Any:
    async def refuse(_requests: object, context: Context) -> None:
        await abort_with(context, Unauthenticated(message))

    return grpc.stream_stream_rpc_method_handler(refuse)  # whatever kind of call it was


_refuse_without_token = _refusal("authorization: no bearer token was shown")
_refuse_unknown_token = _refusal("authorization: the token is not known here")
