"""Reads, sends and checks the tokens that callers send as `authorization: Bearer <token>`."""

from __future__ import annotations

import base64
import hmac
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog

from common.errors import Unauthenticated
from common.rpc.errors import abort_with
from common.rpc.grpc_options import Metadata
from common.rpc.server_bounds import Context, Continuation
from common.rpc.token_files import is_open_to_others, read_token_file

_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_SET_ROLE, _GET_ROLE = "/baton.v1.Roles/SetRole", "/baton.v1.Roles/GetRole"
_SCHEME = "Bearer "

_log = structlog.get_logger(__name__)


def read_tokens(setting: str, path: Path) -> tuple[str, ...]:
    """Returns the tokens in the file `path`. Raises ConfigError, which names `setting`.

    If other users may read the file, it only logs a warning, because mounted secrets are often readable.
    """
    tokens, mode = read_token_file(setting, path)
    warn_if_open(setting, path, mode)
    return tokens


def warn_if_open(setting: str, path: Path, mode: int) -> None:
    """Logs a warning if other users may access a file with a secret. `mode` is the file's mode."""
    if is_open_to_others(mode):
        _log.warning("secret_open_to_others", setting=setting, path=str(path), mode=f"{stat.S_IMODE(mode):o}")


def token_in(header: str) -> str:
    """Returns the token in the value of an `authorization` header, or "" if there is none.

    It is the token of `Bearer`, or the password of `Basic`, which browsers ask people for.
    """
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def is_known(token: str | bytes, tokens: Sequence[str]) -> bool:
    """Returns True if `token` is one of `tokens`. The time it takes tells nothing about the known tokens."""
    shown = token.encode(errors="replace") if isinstance(token, str) else token
    matches = [hmac.compare_digest(shown, known.encode()) for known in tokens]
    return any(matches)


def authorization(token: str) -> Metadata:
    """Returns the call metadata that sends `token`."""
    return (("authorization", f"{_SCHEME}{token}"),)


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without one of `tokens` as UNAUTHENTICATED, before it reads their messages.

    Health checks need no token. If there are `role_tokens`, an order to change the role needs one of these, and whoever
    has one may also ask for the role. Without `tokens` all other calls are open.
    """

    def __init__(self, tokens: Sequence[str], role_tokens: Sequence[str] = ()) -> None:
        self._expected = _headers(tokens)
        self._expected_of = {}
        if role_tokens:
            self._expected_of[_SET_ROLE] = _headers(role_tokens)
            if tokens:
                self._expected_of[_GET_ROLE] = _headers([*tokens, *role_tokens])

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = str(handler_call_details.method)
        expected = self._expected_of.get(method, self._expected)
        if not expected or method.startswith(_OPEN_SERVICES):
            return await continuation(handler_call_details)
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"]
        if len(shown) == 1 and is_known(shown[0], expected):
            return await continuation(handler_call_details)
        return _refuse_without_token if not shown else _refuse_unknown_token


def _headers(tokens: Sequence[str]) -> list[str]:
    return [f"{_SCHEME}{token}" for token in tokens]


def _refusal(message: str) -> Any:
    """Returns a handler that ends any call as UNAUTHENTICATED with `message`."""

    async def refuse(_requests: object, context: Context) -> None:
        await abort_with(context, Unauthenticated(message))

    return grpc.stream_stream_rpc_method_handler(refuse)  # works for every kind of call


_refuse_without_token = _refusal("authorization: no bearer token was shown")
_refuse_unknown_token = _refusal("authorization: the token is not known here")
