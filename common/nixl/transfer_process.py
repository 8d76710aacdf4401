"""The process that NIXL lives in: `python -m common.nixl.transfer_process FILE TIMEOUT_S`, a service's child.

It maps the memory FILE (a descriptor that it inherits), says where, and does what stdin asks, one after the other:

    command  | bytes: u32 | kind: u8 | content |      answer  | bytes: u32 | 0: done, 1: failed | content |

    CONNECT  metadata of the peer's agent
    READ     u64: where in the memory; u64, u64 for each range of the peer's memory: address, bytes
    SERVE    f64: seconds between looks for what peers want of this memory

The first answer comes unasked: u64 address of the memory, then the agent's metadata. The process ends with its stdin,
with the first failure, and where a look or a command takes longer than TIMEOUT_S, by an alarm: its service is told
the same by its own clock, but may be gone.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import signal
import struct
import sys
from contextlib import suppress

import numpy as np

from common.nixl.agent import NixlAgent

CONNECT, READ, SERVE = 1, 2, 3
DONE, FAILED = 0, 1
LENGTH, START, INTERVAL = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")
_STDIN, _STDOUT, _STDERR = 0, 1, 2


def main() -> None:
    file, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the service, which drains
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)  # libraries print
    logging.disable(logging.INFO)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        agent = NixlAgent(memory)
        _write(answers, DONE, START.pack(memory.ctypes.data) + agent.metadata)
        _serve(agent, answers, timeout_s)
    except Exception as error:  # NIXL's have no base of their own
        with suppress(OSError):  # the service may be gone
            _write(answers, FAILED, str(error).encode())
    finally:
        os._exit(0)  # what the library does at its end is nobody's to wait for


def _serve(agent: NixlAgent, answers: int, timeout_s: float) -> None:
    interval_s: float | None = None
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_asked, _, _ = select.select([_STDIN], [], [], interval_s)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        if not is_asked:
            agent.progress()
            continue
        header = os.read(_STDIN, LENGTH.size)
        if not header:
            return
        command = _read(LENGTH.unpack(header + _read(LENGTH.size - len(header)))[0])
        kind, content = command[0], command[1:]
        if kind == CONNECT:
            agent.connect(content)
        elif kind == READ:
            ranges = np.frombuffer(content, np.uint64, offset=START.size).reshape(-1, 2)
            agent.read(ranges, START.unpack_from(content)[0])
        else:
            (interval_s,) = INTERVAL.unpack(content)
        _write(answers, DONE, b"")


def _read(num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = os.read(_STDIN, num_bytes - len(data))
        if not part:
            raise EOFError("the service is gone")
        data += part
    return data


def _write(answers: int, status: int, content: bytes) -> None:
    data = memoryview(LENGTH.pack(1 + len(content)) + bytes([status]) + content)
    while data:
        data = data[os.write(answers, data) :]


if __name__ == "__main__":
    main()
