"""Ports for servers that tests start later, and ports where nothing listens. No other process is given them while the
tests run.
"""

from __future__ import annotations

from baton.free_ports import LOOPBACK, HeldPorts

_HELD: list[HeldPorts] = []


def free_ports(count: int) -> tuple[int, ...]:
    held = HeldPorts(count)
    _HELD.append(held)
    return held.numbers


def free_address() -> str:
    return f"{LOOPBACK}:{free_ports(1)[0]}"
