"""Child processes that share a socket with the process that starts them, and end with it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys


def start_peer(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts `python -m module FILE`, where FILE is the number of the child's end of a socket. Returns the child and
    this process's end. Raises OSError.

    The child has a process group of its own, so Ctrl-C reaches only this process, which stops the child in order.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", module, str(theirs.fileno())]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0)
        except OSError:
            ours.close()
            raise
    return process, ours


def end_with_peer(descriptor: int) -> None:
    """Ends this process as soon as the other end of the socket is closed, whatever it computes then. Call it on a
    thread of its own.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(0)
