"""Ports that nobody listens on."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import ExitStack

LOOPBACK = "127.0.0.1"


def free_ports(count: int, *, taken: Collection[int] = ()) -> list[int]:
    """Returns different ports that are free on loopback now, without those that others are about to take."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            held = stack.enter_context(socket.socket())
            held.bind((LOOPBACK, 0))
            port = held.getsockname()[1]
            if port not in taken:
                ports.append(port)
    return ports
