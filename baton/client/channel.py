"""How clients connect: the servers that an address names, and the gRPC channels to them, with TLS, message sizes,
keepalive, reconnecting, bearer tokens and the caller's trace context.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.errors import Unavailable, invalid_field
from common.addresses import AddressFile, Name, address_of, host_and_port, is_name, parse_name

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_TIME_S = 20
KEEPALIVE_TIMEOUT_S = 10
INITIAL_RECONNECT_S = 0.1
MAX_RECONNECT_S = 1.0
_W3C = TraceContextTextMapPropagator()

ChannelOptions = Mapping[str, int | str]
ChannelT = TypeVar("ChannelT")


@dataclass(frozen=True, slots=True)
class Tls:
    """The PEM files of a TLS connection.

    Without `ca_file`, the system's root certificates are trusted. A certificate with its key makes the connection
    mutual TLS.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None  # the name expected in the server's certificate; None means the address's host

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files and returns gRPC's credentials. Raises InvalidArgument for a file that cannot be read, and if
        only one of certificate and key is given, with which gRPC would end the process.
        """
        if (self.cert_file is None) != (self.key_file is None):
            field = "cert_file" if self.key_file is None else "key_file"
            raise invalid_field(field, "cert_file and key_file go together")
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca_file", self.ca_file),
            private_key=_read("key_file", self.key_file),
            certificate_chain=_read("cert_file", self.cert_file),
        )


def channel_options(tls: Tls | None, overrides: ChannelOptions | None) -> list[tuple[str, int | str]]:
    """Returns gRPC's channel arguments. An argument in `overrides` replaces the default one.

    Keepalive pings are sent only while a call is open and the server is silent, so that a generation notices a dead
    server. Without data between them, gRPC sends two pings, then at most one a minute, as strict servers want.
    """
    options: dict[str, int | str] = {
        "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.keepalive_time_ms": KEEPALIVE_TIME_S * 1000,
        "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_S * 1000,
        "grpc.http2.ping_timeout_ms": KEEPALIVE_TIMEOUT_S * 1000,  # of a process that hangs; by default a minute
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.initial_reconnect_backoff_ms": int(INITIAL_RECONNECT_S * 1000),
        "grpc.max_reconnect_backoff_ms": int(MAX_RECONNECT_S * 1000),
        "grpc.enable_http_proxy": 0,
    }
    if tls is not None and tls.server_name is not None:
        options["grpc.ssl_target_name_override"] = tls.server_name
    options.update(overrides or {})
    return list(options.items())


def authorized(channel: ChannelT, token: str | None) -> ChannelT:
    """Returns a channel for stubs that sends `token` as a bearer token with every call.

    (gRPC's own call credentials need TLS.) Raises ValueError if metadata cannot carry the token; the message does not
    contain it.
    """
    if token is None:
        return channel
    check_token(token)
    return cast(ChannelT, _Authorized(channel, token))


def check_token(token: str) -> None:
    """Raises ValueError if gRPC metadata cannot carry the token. The message does not contain it."""
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("token: must be printable ASCII without spaces")


class _Authorized:
    def __init__(self, channel: Any, token: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return partial(self._call, self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return partial(self._call, self._channel.unary_stream(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return partial(self._call, self._channel.stream_stream(*args, **options))

    def _call(self, method: Any, *args: Any, metadata: _Metadata = (), **options: Any) -> Any:
        return method(*args, metadata=(*self._metadata, *metadata), **options)


def _read(field: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise invalid_field(field, f"{path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """The servers that a client's address names. `addresses` are those known from the start, as gRPC's targets.

    If `is_single`, there is one server, which is called even when it is not ready. `name`, unless it is None, is looked
    up again and again to find further servers.
    """

    addresses: tuple[str, ...]
    is_single: bool = False
    name: Name | None = None


def parse_target(address: str, tls: Tls | None) -> ServerTarget:
    """Parses "HOST:PORT", "HOST:PORT,HOST:PORT,...", "dns:///NAME:PORT" or "file:///PATH".

    The hosts of a list are looked up once, here, which blocks; unknown hosts are left out. Raises InvalidArgument for a
    malformed address, Unavailable when no host of a list is known.
    """
    if is_name(address):
        try:
            name = parse_name(address)
        except ValueError as error:
            raise invalid_field("address", error) from None
        if isinstance(name, AddressFile):
            _require_server_name(tls)
        return ServerTarget((), name=name)
    if "," not in address:
        return ServerTarget((single_server(address),), is_single=True)
    _require_server_name(tls)
    servers = [_host_and_port(part) for part in address.split(",")]
    found = [target for host, port in servers if (target := _look_up(host, port))]
    if not found:
        raise Unavailable(f"{address}: none of these is known")
    return ServerTarget(tuple(dict.fromkeys(found)))


def single_server(address: str) -> str:
    """Returns the target (gRPC's form of an address) for "HOST:PORT". Raises InvalidArgument for anything else."""
    return address_of(*_host_and_port(address))


def numeric_target(address: str) -> str:
    """Returns the target (gRPC's form of an address) for "HOST:PORT" with a numeric HOST."""
    return f"{'ipv6' if address.startswith('[') else 'ipv4'}:{address}"


def _host_and_port(part: str) -> tuple[str, int]:
    try:
        return host_and_port(part.strip())
    except ValueError as error:
        raise invalid_field("address", error) from None


def _require_server_name(tls: Tls | None) -> None:
    if tls is not None and tls.server_name is None:
        raise invalid_field(
            "address", "several addresses with TLS need Tls.server_name, which all their certificates name"
        )


def _look_up(host: str, port: int) -> str:
    """Looks up `host` and returns gRPC's target for its first IPv4 address, else for its first IPv6 address.

    Returns "" if the host has neither.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(socket.gaierror, UnicodeError):  # UnicodeError: a label of the name is empty or too long
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            return numeric_target(address_of(str(found[0][4][0]), port))
    return ""


_Metadata = tuple[tuple[str, str], ...]


def trace_metadata() -> _Metadata:
    """Returns the current span's `traceparent`, and its `tracestate` if it has one. Without a span it is empty."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())
