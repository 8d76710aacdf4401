"""The child's side of a protocol in which a service sends commands to a child process, one at a time, over a socket.

    command  | content |      answer  | status: u8 | content |

If a command takes too long, an alarm kills the child. The service has a timeout of its own, but may hang itself.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

DONE, FAILED = 0, 1
_STDOUT, _STDERR = 1, 2


class Asker:
    """The child's connection to the service that started it. `file` is the number of the inherited socket.

    An alarm kills the child if it takes longer than `timeout_s` to start or to carry out a command.
    """

    def __init__(self, file: int, timeout_s: float) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # the service handles them, and drains first
            signal.signal(number, signal.SIG_IGN)
        self._connection = Connection(file)
        self._timeout_s = timeout_s
        os.dup2(_STDERR, _STDOUT)  # what libraries print is no output of the service
        signal.setitimer(signal.ITIMER_REAL, timeout_s)

    def command(self, interval_s: float | None = None) -> bytes | None:
        """Waits for the next command and returns it, or None if none came within `interval_s` (None: no limit).

        Raises EOFError or OSError if the service is gone.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_asked = self._connection.poll(interval_s)
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
        return self._connection.recv_bytes() if is_asked else None

    def answer(self, status: int, content: bytes = b"") -> None:
        """Sends an answer. `status` is DONE or FAILED, or another one that the service understands."""
        self._connection.send_bytes(bytes([status]) + content)
