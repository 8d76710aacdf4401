"""Turns a client's address into gRPC's target: one server, or several that are used in turn when ready."""

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
    """Returns gRPC's target for `address`, and the channel arguments.

    "HOST:PORT" is one server, which is called even when it is not ready. "HOST:PORT,HOST:PORT,..." names several
    servers. Their hosts are looked up once, here, which blocks; unknown hosts are left out. "dns:///NAME:PORT" names
    all servers that DNS lists for the name. gRPC looks it up again whenever a connection ends, and decode services end
    theirs from time to time for that reason.

    Raises InvalidArgument for a malformed address, Unavailable when no host is known.
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
    """Returns gRPC's target for "HOST:PORT". Raises InvalidArgument for anything else."""
    return address_of(*_host_and_port(address))


def _host_and_port(part: str) -> tuple[str, int]:
    try:
        return host_and_port(part.strip())
    except ValueError as error:
        raise InvalidArgument(f"address: {error}", reason="INVALID_FIELD", metadata={"field": "address"}) from None


def _look_up(host: str, port: int, family: socket.AddressFamily) -> str:
    """Looks up `host` and returns its first numeric address with the port, or "" if there is none."""
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # UnicodeError: a label of the name is empty or too long
        return ""
    number = found[0][4][0]
    return f"[{number}]:{port}" if family is socket.AF_INET6 else f"{number}:{port}"
