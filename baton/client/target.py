"""Parses a client's address: one server, a list of servers, or a name that stands for several."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from baton.client.channel import Tls
from baton.errors import InvalidArgument, Unavailable
from common.addresses import AddressFile, Name, address_of, host_and_port, is_name, parse_name

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


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
            raise _malformed(error) from None
        if isinstance(name, AddressFile):
            _require_server_name(tls)
        return ServerTarget((), name=name)
    if "," not in address:
        return ServerTarget((single_server(address),), is_single=True)
    _require_server_name(tls)
    servers = [_host_and_port(part) for part in address.split(",")]
    for family in _FAMILIES:
        found = [target for host, port in servers if (target := _look_up(host, port, family))]
        if found:
            return ServerTarget(tuple(dict.fromkeys(found)))
    raise Unavailable(f"{address}: none of these is known")


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
        raise _malformed(error) from None


def _require_server_name(tls: Tls | None) -> None:
    if tls is not None and tls.server_name is None:
        raise _malformed("several addresses with TLS need Tls.server_name, which all their certificates name")


def _malformed(why: object) -> InvalidArgument:
    return InvalidArgument(f"address: {why}", reason="INVALID_FIELD", metadata={"field": "address"})


def _look_up(host: str, port: int, family: socket.AddressFamily) -> str:
    """Looks up `host` and returns gRPC's target for its first address, or "" if there is none."""
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # UnicodeError: a label of the name is empty or too long
        return ""
    return numeric_target(address_of(str(found[0][4][0]), port))
