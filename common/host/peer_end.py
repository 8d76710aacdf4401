"""Ends a process with the one that started it."""

from __future__ import annotations

import os
import select


def end_with_peer(descriptor: int) -> None:
    """Ends the process as soon as the other end of the socket is closed, whatever it computes then. Call it on a thread
    of its own.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(0)
