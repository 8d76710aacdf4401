"""What a child process does that its service asks by pipes, one command after the other.

    command  | bytes: u32 | content |      answer  | bytes: u32 | status: u8 | content |

The process ends with its stdin, and where a command takes too long, by an alarm: its service is told the same by its
own clock, but may be gone.
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
    """The service that started this process. From the start, and from each command, it waits `timeout_s` at most."""

    def __init__(self, timeout_s: float) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # meant for the service, which drains
            signal.signal(number, signal.SIG_IGN)
        self._timeout_s = timeout_s
        self._answers = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)  # libraries print
        signal.setitimer(signal.ITIMER_REAL, timeout_s)

    def command(self, interval_s: float | None = None) -> bytes | None:
        """The next one, or None where none came within `interval_s`. Raises EOFError when the service is gone."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_asked, _, _ = select.select([_STDIN], [], [], interval_s)
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
        return _read(LENGTH.unpack(_read(LENGTH.size))[0]) if is_asked else None

    def answer(self, status: int, content: bytes = b"") -> None:
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
