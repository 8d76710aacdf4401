"""How settings say where services are: "HOST:PORT" is one, "dns:///NAME:PORT" every one behind the name."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self

_DNS = "dns:///"


@dataclass(frozen=True, slots=True)
class DnsName:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for anything but "dns:///NAME:PORT"."""
        try:
            if not text.startswith(_DNS):
                raise ValueError
            host, port = host_and_port(text.removeprefix(_DNS))
        except ValueError:
            raise ValueError(f"{text!r} is not {_DNS}NAME:PORT") from None
        return cls(host, port)

    def __str__(self) -> str:
        return _DNS + address_of(self.host, self.port)


def is_dns_name(text: str) -> bool:
    return text.startswith("dns:")


def host_and_port(address: str) -> tuple[str, int]:
    """Of "HOST:PORT", an IPv6 host without its brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric_form(address: str) -> str:
    """The one way to write a numeric "HOST:PORT"; one whose host is a name as it is."""
    host, port = host_and_port(address)
    try:
        return address_of(str(ip_address(host)), port)
    except ValueError:
        return address
