"""Parses addresses in settings: "HOST:PORT" is one service, "dns:///NAME:PORT" all services that the name
resolves to, and "file:///PATH" all services that the file lists.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from errno import EADDRINUSE
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Self

_DNS = "dns:///"
_FILE = "file:///"
_NOT_IN_A_HOST = frozenset(" /?#@[]")
_MAX_PORT = 65535
_CONNECT_TIMEOUT_S = 1.0
_PRIVATE_DOMAINS = frozenset({"localhost", "localdomain", "local", "internal"})


@dataclass(frozen=True, slots=True)
class DnsName:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses "dns:///NAME:PORT". Raises ValueError for any other text."""
        try:
            if not text.startswith(_DNS):
                raise ValueError
            host, port = host_and_port(text.removeprefix(_DNS))
        except ValueError:
            raise ValueError(f"{text!r} is not {_DNS}NAME:PORT") from None
        return cls(host, port)

    @property
    def certified_host(self) -> str | None:
        """The host that the certificates of all services behind the name are for."""
        return self.host

    def __str__(self) -> str:
        return _DNS + address_of(self.host, self.port)


@dataclass(frozen=True, slots=True)
class AddressFile:
    """A file that lists services, one "HOST:PORT" a line, with numeric hosts."""

    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses "file:///PATH". Raises ValueError for any other text."""
        path = "/" + text.removeprefix(_FILE)
        if not text.startswith(_FILE) or path.endswith("/") or not path.isprintable():
            raise ValueError(f"{text!r} is not {_FILE}PATH")
        return cls(path)

    @property
    def certified_host(self) -> str | None:
        """None, because the services have no host in common. Each certificate is for its own service's address."""
        return None

    def __str__(self) -> str:
        return _FILE + self.path.removeprefix("/")


Name = DnsName | AddressFile
"""Stands for a set of services that changes, and is looked up again and again."""


def is_name(text: str) -> bool:
    return text.startswith(("dns:", "file:"))


def parse_name(text: str) -> Name:
    """Parses "dns:///NAME:PORT" or "file:///PATH". Raises ValueError for any other text."""
    return AddressFile.parse(text) if text.startswith("file:") else DnsName.parse(text)


def host_and_port(address: str) -> tuple[str, int]:
    """Splits "HOST:PORT"; the brackets of an IPv6 host are removed. Raises ValueError for any other text."""
    scheme, is_url, _ = address.partition("://")
    if is_url:
        raise ValueError(f"{address!r} is not HOST:PORT: leave {scheme}:// away")
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    is_host = bool(host) and host.isprintable() and not set(host) & _NOT_IN_A_HOST
    if not is_host or not (port.isascii() and port.isdecimal()) or int(port) > _MAX_PORT:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host, int(port)


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def why_not_listen(address: str) -> str:
    """Returns why no server can listen on "HOST:PORT" now, or "" if one can."""
    host, port = host_and_port(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
        why = getattr(error, "strerror", None) or str(error)
        return f"{why}; take another port, or 0 for a free one" if getattr(error, "errno", 0) == EADDRINUSE else why
    return ""


def is_listened_on(address: str) -> bool:
    """Returns whether "HOST:PORT" accepts a connection now."""
    try:
        socket.create_connection(host_and_port(address), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def numeric_form(address: str) -> str:
    """Returns the canonical form of "HOST:PORT" if HOST is an IP address, and the address unchanged otherwise."""
    host, port = host_and_port(address)
    try:
        return address_of(str(ip_address(host)), port)
    except ValueError:
        return address


def network_of(host: str) -> str:
    """Returns the network that identifies a client: the /64 of an IPv6 host, or an IPv4 host itself. A name stays
    unchanged.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ip_network((address, 64), strict=False))


def host_of_authority(authority: str) -> str:
    """Returns the host in HTTP's "HOST" or "HOST:PORT", in small letters and without the dot that may end a name."""
    host, _, port = authority.rpartition(":")
    if not host or not port.isdecimal():
        host = authority
    return host.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def names_this_machine(host: str) -> bool:
    """Returns whether a request that came over loopback may name this host: an IP address, a name without a dot, or one
    below a domain that is no public one. A web page's domain is none of these, whatever address it resolves to.
    """
    try:
        ip_address(host)
    except ValueError:
        return "." not in host or host.rpartition(".")[2] in _PRIVATE_DOMAINS or host == socket.gethostname().lower()
    return True


def is_loopback(address: str) -> bool:
    """Returns whether "host:port" is reachable from this machine only; False for every host name but localhost, and
    for a file of addresses.
    """
    if address.startswith(_FILE):
        return False
    host, _ = host_and_port(address.removeprefix(_DNS))
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
