"""Turns gRPC's text about a failed connection into one plain sentence for users."""

from __future__ import annotations

import re
from urllib.parse import unquote

_NOT_CONNECTED = re.compile(
    r"(?:failed to connect to all addresses|connections to all backends failing); last error: "
    r"[A-Z_]+: ipv[46]:(?P<address>\S+): (?P<why>.*)",
    re.DOTALL,
)
_NOT_FOUND = re.compile(r"errors resolving (?P<address>\S+): .*", re.DOTALL)
_REMOTE = "Failed to connect to remote host: "
_WORDS = (
    ("Connection refused", "nothing listens at {address} (connection refused)"),
    (_REMOTE, "{address} cannot be reached: {cause}"),
    (
        "http1.x server",
        "{address} speaks HTTP/1 and no gRPC: it may be Baton's gateway; the decode service has an address of its own, "
        "port 50051 by default",
    ),
    ("Failed parsing HTTP/2", "{address} does not speak gRPC: it is no service of Baton"),
    ("WRONG_VERSION_NUMBER", "{address} does not speak TLS: leave TLS off, or give another address"),
    ("certificate has expired", "the certificate of {address} has expired"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the certificate of {address} is not trusted{verdict}: name the authority that signed it (CA file)",
    ),
    (
        "Hostname Verification",
        "the certificate of {address} is for another hostname: use one that it names, or say which (server name)",
    ),
    ("security handshaker", "{address}: no TLS with these files: CA, certificate and key must be PEM, and fit"),
    (
        "",
        "{address} closed the connection at once: it wants TLS, or a client certificate that it trusts, or is no "
        "service of Baton",
    ),
)
"""The first whose part gRPC's text holds."""
_VERDICT = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: (?P<verdict>[^:]+))?")
_BROKEN = {
    "Socket closed": "the connection broke: the server ended, or cannot be reached any more",
    "Cancelling all calls": "the server stopped",
    "Deadline Exceeded": "no answer came in time",
}
_RESET = "Connection reset by peer"


def connection_words(details: str) -> str:
    """`details` of a status that gRPC itself made, in plain words; any other text as it is."""
    if found := _NOT_CONNECTED.fullmatch(details):
        address, why = unquote(found["address"]), found["why"]
        verdict = _VERDICT.search(why)
        return next(words for part, words in _WORDS if part in why).format(
            address=address,
            cause=why.removeprefix(_REMOTE),
            verdict=f" ({verdict['verdict']})" if verdict and verdict["verdict"] else "",
        )
    if found := _NOT_FOUND.fullmatch(details):
        return f"no host is known by the name of {found['address']}"
    if details.endswith(_RESET) or f"{_RESET} (" in details:
        return _BROKEN["Socket closed"]
    return _BROKEN.get(details, details)
