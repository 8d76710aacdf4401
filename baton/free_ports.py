"""Finds ports that no process listens on, and keeps them for servers that listen later."""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections.abc import Collection

LOOPBACK = "127.0.0.1"


class HeldPorts:
    """Free ports of loopback. On Linux the system gives none of them, while they are held, to a process that asks for
    any port; a process may still ask for one by its number.

    A socket that does not listen is bound to each. A server can listen on the port all the same, again and again, if it
    sets SO_REUSEADDR, as servers of gRPC and asyncio do. On other systems such a socket would block servers, so the
    ports are only free at first. They are held until `release`, or until the object is no longer referred to.
    """

    def __init__(self, count: int, *, taken: Collection[int] = ()) -> None:
        """Ports in `taken` are left out: other processes are about to listen on them."""
        bound: list[int] = []
        self.release = weakref.finalize(self, _close, bound)
        numbers: list[int] = []
        while len(numbers) < count:
            with socket.socket() as held:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind((LOOPBACK, 0))
                number = held.getsockname()[1]
                bound.append(held.detach())
            if number not in taken:
                numbers.append(number)
        self.numbers = tuple(numbers)
        if sys.platform != "linux":
            self.release()


def _close(descriptors: Collection[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
