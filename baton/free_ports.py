"""Finds ports that no process listens on."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import ExitStack

LOOPBACK = "127.0.0.1"


def free_ports(count: int, *, taken: Collection[int] = ()) -> list[int]:
    """Returns `count` different ports that are free on loopback now.

    Ports in `taken` are left out: other processes are about to listen on them.
    """
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            held = stack.enter_context(socket.socket())
            held.bind((LOOPBACK, 0))
            port = held.getsockname()[1]
            if port not in taken:
                ports.append(port)
    return ports
