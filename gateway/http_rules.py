"""Refuses ambiguous HTTP, which servers and proxies may read in different ways, before it becomes a request."""

from __future__ import annotations

import re
from dataclasses import dataclass

import h11

from gateway.errors import ApiError

_VERSIONS = (b"1.0", b"1.1")
_AUTHORITY = re.compile(rb"(?P<host>[A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_ABSOLUTE = re.compile(rb"https?://(?P<authority>[^/?#]*)(?P<rest>[^#]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to malformed HTTP. `reason` goes to the log and quotes nothing that the client sent."""

    error: ApiError
    reason: str


class StrictConnection(h11.Connection):
    """h11's connection with stricter rules. `refusal` says why the last input was refused; None if it was not.

    It also accepts request targets in absolute form (http://HOST/PATH).
    """

    refusal: Refusal | None = None

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:  # the exception's message may quote the client's line
            self.refusal = Refusal(ApiError(400, f"this is no HTTP/1.1: {error}"[:256]), str(error).partition(":")[0])
            raise
        if not isinstance(event, h11.Request):
            return event
        try:
            return _checked(event)
        except ApiError as error:
            self.refusal = Refusal(error, str(error))
            raise h11.RemoteProtocolError(str(error)) from None


def _checked(request: h11.Request) -> h11.Request:
    """Checks a request's head and returns it with the target as a path. Raises ApiError."""
    if request.http_version not in _VERSIONS:
        raise ApiError(505, "this version of HTTP is not spoken here, HTTP/1.1 is")
    given = {name for name, _ in request.headers}
    if b"transfer-encoding" in given and b"content-length" in given:
        raise ApiError(400, "content-length and transfer-encoding exclude each other")
    if b"transfer-encoding" in given and request.http_version == b"1.0":
        raise ApiError(400, "HTTP/1.0 has no transfer-encoding")
    for name, value in request.headers:
        if name == b"host":
            _check_authority("host", value)
    if request.target.startswith(b"/") or (request.method, request.target) == (b"OPTIONS", b"*"):
        return request
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        raise ApiError(400, "the request's target is neither a path nor http://HOST/PATH")
    _check_authority("the target's host", absolute["authority"])
    rest = absolute["rest"]
    return h11.Request(
        method=request.method,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        headers=[*((n, v) for n, v in request.headers if n != b"host"), (b"host", absolute["authority"])],
        http_version=request.http_version,
    )


def _check_authority(what: str, value: bytes) -> None:
    match = _AUTHORITY.fullmatch(value)
    if match is None or int(match["port"] or 0) > 65535:
        raise ApiError(400, f"{what}: is not HOST or HOST:PORT")
