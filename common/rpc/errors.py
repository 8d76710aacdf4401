"""Writes and reads gRPC statuses with google.rpc.ErrorInfo, and explains gRPC's own connection errors."""

from __future__ import annotations

import asyncio
import re
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from common.errors import BatonError
from common.peer_text import peer_text

ERROR_DOMAIN = "baton"
STATUS_TIMEOUT_S = 2.0
_MAX_MESSAGE_BYTES = 1024

_NOT_CONNECTED = re.compile(
    r"(?:failed to connect to all addresses|connections to all backends failing); last error: "
    r"(?:[A-Z_]+: )?ipv[46]:(?P<address>\S+): (?P<why>.*)",
    re.DOTALL,
)
_NOT_FOUND = re.compile(r"errors resolving (?P<address>\S+): .*", re.DOTALL)
_REMOTE = re.compile("Failed to connect to remote host: |connect failed: addr: .* error: ")
_HANGS = "{address} takes connections and answers none: it hangs, or is no gRPC service"
_CLOSED = (
    "{address} closed the connection at once: it wants TLS, or a client certificate that it trusts, or is no service "
    "of Baton"
)
_RESET = "Connection reset by peer"
_WORDS = (
    ("Connection refused", "nothing listens at {address} (connection refused)"),
    ("Failed to connect to remote host: ", "{address} cannot be reached: {cause}"),
    ("connect failed: addr: ", "{address} cannot be reached: {cause}"),
    ("backend unhealthy", "{address} says that it is not ready"),
    (
        "http1.x server",
        "{address} speaks HTTP/1 and no gRPC: it may be Baton's gateway; the decode service has an address of its own, "
        "port 50051 by default",
    ),
    ("health check call failed", "{address} does not say whether it is ready: {cause}"),
    ("timed out before receiving SETTINGS", _HANGS),
    ("Handshake read failed (Endpoint closing)", _HANGS),
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
    ("Socket closed", _CLOSED),
    (_RESET, _CLOSED),
    ("_ALERT_", _CLOSED),  # of TLS 1.2, with which the server refused a client certificate or missed one
    ("Unwrap failed", _CLOSED),  # such an alert of TLS 1.3
    ("", "{address} cannot be used: {cause}"),
)
"""Pairs of a part of gRPC's text and our explanation. The first pair whose part occurs in the text is used."""
_VERDICT = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: (?P<verdict>[^:]+))?")
_BROKEN = {
    "Socket closed": "the connection broke: the server ended, or cannot be reached any more",
    "Stream removed": "the connection broke: the server ended, or cannot be reached any more",
    "Cancelling all calls": "the server stopped",
    "ping timeout": "the server has not answered: it hangs or cannot be reached",
    "Deadline Exceeded": "no answer came in time",
}
_REMOVED = re.compile(r"Stream removed \((.*)\)", re.DOTALL)


def status_of(error: BatonError) -> status_pb2.Status:
    """Returns the gRPC status of `error`. The message is cut: a peer drops trailers above 8 KiB, code included."""
    detail = any_pb2.Any()
    metadata = {key: peer_text(value) for key, value in error.metadata.items()}
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata))
    code: int = grpc.StatusCode[error.code].value[0]
    return status_pb2.Status(code=code, message=peer_text(str(error), _MAX_MESSAGE_BYTES), details=[detail])


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call with the status of `error`. Raises CancelledError if that takes longer than STATUS_TIMEOUT_S.

    The timeout is for a peer that reads nothing, and so does not take the status either. gRPC keeps a few KiB for its
    stream until the connection ends.
    """
    status = rpc_status.to_status(status_of(error))
    trailing_metadata = tuple(status.trailing_metadata or ())
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            await context.abort(status.code, status.details or "", trailing_metadata)
    except TimeoutError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


def error_info(failure: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    """Returns the ErrorInfo of a failed call's status, or None if it has none, or its details contradict its code."""
    try:
        status = rpc_status.from_call(failure)  # type: ignore[arg-type]  # an RpcError of a call is its Call
    except ValueError:
        return None
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    return None


def connection_words(details: str) -> str:
    """Returns an explanation of `details`, the text of a status that gRPC itself made; other texts unchanged."""
    if found := _NOT_CONNECTED.fullmatch(details):
        return _unreachable_words(unquote(found["address"]), found["why"])
    if found := _NOT_FOUND.fullmatch(details):
        return f"no host is known by the name of {found['address']}"
    if removed := _REMOVED.fullmatch(details):
        details = removed[1]
    if details.endswith(_RESET) or f"{_RESET} (" in details:
        return _BROKEN["Socket closed"]
    return _BROKEN.get(details, details)


def unconnected_words(address: str, cause: str) -> str:
    """Returns the same explanation where another client than gRPC could not connect, for the system's `cause`."""
    return _unreachable_words(address, f"Failed to connect to remote host: {cause}")


def _unreachable_words(address: str, why: str) -> str:
    verdict = _VERDICT.search(why)
    return next(words for part, words in _WORDS if part in why).format(
        address=address,
        cause=_REMOTE.sub("", why, count=1),
        verdict=f" ({verdict['verdict']})" if verdict and verdict["verdict"] else "",
    )
