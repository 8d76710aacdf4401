"""Which servers a client calls: one, or in turn the ready ones of several."""

from __future__ import annotations

import json
import socket

from baton.client.channel import ChannelOptions, Tls, channel_options
from baton.errors import InvalidArgument, Unavailable
from common.addresses import address_of, host_and_port

_INFERENCE_SERVICE = "baton.v1.Inference"
_READY_IN_TURN = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": _INFERENCE_SERVICE}}
)
_MIN_S_BETWEEN_LOOKUPS = 5
_SCHEMES = {socket.AF_INET: "ipv4", socket.AF_INET6: "ipv6"}


def target_and_options(
    address: str, tls: Tls | None, overrides: ChannelOptions | None
) -> tuple[str, list[tuple[str, int | str]]]:
    """gRPC's target for `address`, and its channel arguments.

    "HOST:PORT" is one server, which answers for itself when it is not ready. "HOST:PORT,HOST:PORT,..." names several,
    whose hosts are looked up now, once, which blocks; hosts that are not known are left out. "dns:///NAME:PORT" names
    those that gRPC finds behind the name, again each time a connection ends, which a decode service sees to. Raises
    InvalidArgument for an address that names none, Unavailable when no host is known.
    """
    if "," not in address and not address.startswith("dns:"):
        return single_server(address), channel_options(tls, overrides)
    balanced: ChannelOptions = {
        "grpc.service_config": _READY_IN_TURN,
        "grpc.dns_min_time_between_resolutions_ms": _MIN_S_BETWEEN_LOOKUPS * 1000,
        **(overrides or {}),
    }
    if address.startswith("dns:"):
        return address, channel_options(tls, balanced)
    if tls is not None and tls.server_name is None:
        raise InvalidArgument(
            "address: several addresses with TLS need Tls.server_name, which all their certificates name",
            reason="INVALID_FIELD",
            metadata={"field": "address"},
        )
    servers = [_host_and_port(part) for part in address.split(",")]
    for family, scheme in _SCHEMES.items():
        found = [number for host, port in servers if (number := _look_up(host, port, family))]
        if found:
            return f"{scheme}:{','.join(found)}", channel_options(tls, balanced)
    raise Unavailable(f"{address}: none of these is known")


def single_server(address: str) -> str:
    """gRPC's target for "HOST:PORT". Raises InvalidArgument for anything else."""
    return address_of(*_host_and_port(address))


def _host_and_port(part: str) -> tuple[str, int]:
    try:
        return host_and_port(part.strip())
    except ValueError as error:
        raise InvalidArgument(f"address: {error}", reason="INVALID_FIELD", metadata={"field": "address"}) from None


def _look_up(host: str, port: int, family: socket.AddressFamily) -> str:
    """The first numeric address, "" without one."""
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # the latter of a label that is empty or too long
        return ""
    number = found[0][4][0]
    return f"[{number}]:{port}" if family is socket.AF_INET6 else f"{number}:{port}"
