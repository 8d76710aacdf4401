"""Child processes that end with the process that starts them."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any


class Child(subprocess.Popen[bytes]):
    """A child process that the kernel kills as soon as this process has ended, whatever either of them does then, or
    as soon as this object is gone.

    Its stdin is a pipe to which nobody writes. When its other end, which only this process has, is closed, the kernel
    sends SIGKILL. On systems other than Linux the child's stdin ends, and nothing kills it. Raises OSError.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        theirs, ours = os.pipe()
        hang_up = weakref.finalize(self, os.close, ours)
        try:
            if sys.platform == "linux":
                fcntl.fcntl(theirs, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_ASYNC)
            super().__init__(command, stdin=theirs, **options)
            fcntl.fcntl(theirs, fcntl.F_SETOWN, self.pid)
        except BaseException:
            hang_up()
            raise
        finally:
            os.close(theirs)


def start_peer(module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> tuple[Child, socket.socket]:
    """Starts `python -m module FILE arguments`, where FILE is the descriptor of the child's end of a socket. Returns
    the child and this process's end. The child inherits the descriptors `pass_fds`. Raises OSError.

    The child has a process group of its own, so Ctrl-C reaches only this process, which ends the child when it ends.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", module, str(theirs.fileno()), *arguments]
        try:
            child = Child(command, pass_fds=[theirs.fileno(), *pass_fds], process_group=0)
        except OSError:
            ours.close()
            raise
    return child, ours
