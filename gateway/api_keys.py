"""Checks the API keys that callers of /v1 send as `authorization: Bearer <key>`, or as Anthropic's clients do."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from common.rpc.bearer_tokens import is_known, token_in
from gateway.errors import ApiError

_SCHEME = b"bearer "
_BARE_HEADER = b"x-api-key"
_PASSWORD = 'Basic realm="Baton"'


class ApiKeys:
    """Checks the API keys of requests. Without any configured key, every caller is accepted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, headers: Sequence[tuple[bytes, bytes]], *, takes_bare: bool = False) -> str:
        """Checks the key in a request's headers. Raises ApiError 401 unless it is a configured one.
        Without configured keys every request passes. With `takes_bare` the key may also come in `x-api-key`, or in both
        headers if it is the same.

        Returns a name for the key, such as "key 1", if several are configured, and else "". The time that it takes does
        not tell how much of a wrong key is right.
        """
        if not self._keys:
            return ""
        names = (b"authorization", _BARE_HEADER) if takes_bare else (b"authorization",)
        shown = [(name, value if name == _BARE_HEADER else _bearer(value)) for name, value in headers if name in names]
        if not shown:
            how = "'Authorization: Bearer KEY'" + (" or 'x-api-key: KEY'" if takes_bare else "")
            raise _unknown(f"authorization: no API key was shown; send {how}")
        _, key = shown[0]
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        is_clear = len(dict(shown)) == len(shown) and all(other == key for _, other in shown)
        if not is_clear:
            raise _unknown("authorization: more than one API key was shown", code="invalid_api_key")
        if not any(matches):
            raise _unknown("authorization: the API key is not known here", code="invalid_api_key")
        return f"key {matches.index(True)}" if len(self._keys) > 1 else ""

    def check_viewer(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Checks the key of a request for the status page or metrics. Raises ApiError 401 unless it is configured.

        Here the key may also be sent as the password of basic authentication, as browsers do.
        """
        shown = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        keys = [key.decode() for key in self._keys]
        if len(shown) != 1 or not is_known(token_in(shown[0]), keys):
            raise ApiError(
                401, "authorization: show an API key, or give it as password", headers={"www-authenticate": _PASSWORD}
            )


def _bearer(header: bytes) -> bytes:
    """Returns the key in the value of an `authorization` header, or b"" if there is none."""
    return header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else b""


def _unknown(message: str, *, code: str | None = None) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})
