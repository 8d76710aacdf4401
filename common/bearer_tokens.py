"""Tokens that a caller shows as `authorization: Bearer <token>`, and the check of them."""

from __future__ import annotations

import base64
import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog

from common.errors import ConfigError, Unauthenticated
from common.rpc_errors import abort_with
from common.rpc_requests import Context, Continuation
from common.wire.grpc_options import Metadata

_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_SCHEME = "Bearer "
_MAX_FILE_BYTES = 1 << 20
_MIN_TOKEN_CHARS = 8

_log = structlog.get_logger(__name__)


def read_tokens(setting: str, path: Path) -> tuple[str, ...]:
    """The tokens in a file, one a line, each once. Raises ConfigError naming `setting`, and never quotes what was read.

    A file that others may read is warned about: where secrets are mounted, the group often may. One that everybody may
    write to is refused.
    """

    def wrong(reason: str | None) -> ConfigError:
        return ConfigError(f"{setting}: {path}: {reason}")

    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise wrong(error.strerror) from None
    except UnicodeDecodeError:
        raise wrong("is not text") from None
    if len(data) > _MAX_FILE_BYTES:
        raise wrong("is too large for a file of tokens")
    if mode & stat.S_IWOTH and stat.S_ISREG(mode):
        raise wrong("everybody may write to it: chmod 600")
    warn_if_open(setting, path, mode)
    tokens: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not (token := line.strip(" \t\r")):
            continue
        if not token.isascii() or not token.isprintable() or " " in token:
            raise wrong(f"line {number} has spaces, or characters other than printable ASCII")
        if len(token) < _MIN_TOKEN_CHARS:
            raise wrong(f"line {number} is shorter than {_MIN_TOKEN_CHARS} characters: it can be guessed")
        tokens[token] = None
    if not tokens:
        raise wrong("holds no token")
    return tuple(tokens)


def warn_if_open(setting: str, path: Path, mode: int) -> None:
    """Of a file with a secret, whose mode this is."""
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        _log.warning("secret_open_to_others", setting=setting, path=str(path), mode=f"{stat.S_IMODE(mode):o}")


def token_in(header: str) -> str:
    """What `authorization: Bearer TOKEN` shows, or the password of `Basic`, which browsers ask people for; or ""."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def is_known(token: str, tokens: Sequence[str]) -> bool:
    """Takes the same time whichever token it is, and however much of one is right."""
    matches = [hmac.compare_digest(token.encode(), known.encode()) for known in tokens]
    return any(matches)


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
