"""Ports for servers that tests start later, and ports where nothing listens. No other process is given them while the
tests run.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest

from baton.free_ports import LOOPBACK, HeldPorts

_HELD: list[HeldPorts] = []


def free_ports(count: int) -> tuple[int, ...]:
    held = HeldPorts(count)
    _HELD.append(held)
    return held.numbers


def free_address() -> str:
    return f"{LOOPBACK}:{free_ports(1)[0]}"


def _listens_at(host: str) -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as listener:
        listener.bind((host, 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not _listens_at("::1"), reason="this machine has no loopback of IPv6")
