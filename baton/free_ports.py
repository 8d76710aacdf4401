"""Ports that nobody listens on."""

from __future__ import annotations

import socket
from contextlib import ExitStack

LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Different ones, free on loopback at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind((LOOPBACK, 0))
        return [held.getsockname()[1] for held in sockets]
