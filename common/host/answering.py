"""The child's side of a protocol in which a service sends commands to a child process by pipes, one at a time.

    command  | bytes: u32 | content |      answer  | bytes: u32 | status: u8 | content |

The child ends when its stdin is closed. If a command takes too long, an alarm kills the child. The service has a
timeout of its own, but may be gone by then.
"""

from __future__ import annotations

import os
import select
import signal
import struct

DONE, FAILED = 0, 1
LENGTH = struct.Struct("<I")
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class Asker:
    """The child's connection to the service that started it.

    An alarm kills the child if it takes longer than `timeout_s` to start or to carry out a command.
    """

    def __init__(self, timeout_s: float) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # the service handles them, and drains first
            signal.signal(number, signal.SIG_IGN)
        self._timeout_s = timeout_s
        self._answers = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)  # what libraries print must not get between the answers
        signal.setitimer(signal.ITIMER_REAL, timeout_s)

    def command(self, interval_s: float | None = None) -> bytes | None:
        """Waits for the next command and returns it, or None if none came within `interval_s` (None: no limit).

        Raises EOFError if the service is gone.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_asked, _, _ = select.select([_STDIN], [], [], interval_s)
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
        return _read(LENGTH.unpack(_read(LENGTH.size))[0]) if is_asked else None

    def answer(self, status: int, content: bytes = b"") -> None:
        """Sends an answer. `status` is DONE or FAILED, or another one that the service understands."""
        data = memoryview(LENGTH.pack(1 + len(content)) + bytes([status]) + content)
        while data:
            data = data[os.write(self._answers, data) :]


def _read(num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = os.read(_STDIN, min(num_bytes - len(data), 1 << 20))
        if not part:
            raise EOFError("the service is gone")
        data += part
    return bytes(data)
