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

_children: weakref.WeakSet[Child] = weakref.WeakSet()


class Child(subprocess.Popen[bytes]):
    """A child process that the kernel kills as soon as this process has ended, in whatever way.

    It inherits one end of a pipe to which nobody writes. When the other end, which only this process has, is closed,
    the kernel sends SIGKILL. On systems other than Linux nothing kills it. Its stdin is empty. Raises OSError.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any) -> None:
        theirs, ours = os.pipe()
        self.hang_up = weakref.finalize(self, os.close, ours)
        _children.add(self)
        self.hang_up.atexit = False  # at its end this process may still stop the child in order
        try:
            if sys.platform == "linux":
                fcntl.fcntl(theirs, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(theirs, fcntl.F_SETFL, os.O_ASYNC)
            super().__init__(command, stdin=subprocess.DEVNULL, pass_fds=[theirs, *pass_fds], **options)
            fcntl.fcntl(theirs, fcntl.F_SETOWN, self.pid)
        except BaseException:
            if getattr(self, "pid", None) is not None:  # as after KeyboardInterrupt
                self.kill()
                self.wait()
            self.hang_up()
            raise
        finally:
            os.close(theirs)


def _leave_children_to_the_parent() -> None:
    """In a process forked from this one, closes its copies of the pipes, which would keep the children alive."""
    for child in _children:
        child.hang_up()


os.register_at_fork(after_in_child=_leave_children_to_the_parent)


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
