"""A child process of a service that runs NIXL: `python -m common.nixl.transfer_process FILE MEMORY TIMEOUT_S`.

It maps the memory MEMORY, a descriptor that it inherits, and then carries out commands from its service, which come
through the socket FILE (see `common.host.answering`):

    command  | kind: u8 | content |      answer  DONE, or FAILED with the reason

    CONNECT  metadata of the peer's agent
    READ     u64: offset in the memory; u64, u64 for each range of the peer's memory: address, number of bytes
    SERVE    f64: seconds between two polls of NIXL, which serve peers' reads of this memory

It sends a first answer without a command: the u64 address of the memory, then the agent's metadata. The process ends
when its service is gone, after the first failure, and if a command or a poll takes longer than TIMEOUT_S.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import sys
from contextlib import suppress

import numpy as np

from common.host.answering import DONE, FAILED, Asker
from common.nixl.agent import NixlAgent

CONNECT, READ, SERVE = 1, 2, 3
START, INTERVAL = struct.Struct("<Q"), struct.Struct("<d")


def main() -> None:
    """Carries out the service's commands until one fails or the service is gone, then ends the process.

    The command line gives the socket, the memory's descriptor, and the most seconds that a command or a poll may take.
    """
    asker, file = Asker(int(sys.argv[1]), float(sys.argv[3])), int(sys.argv[2])
    logging.disable(logging.INFO)
    try:
        memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        agent = NixlAgent(memory)
        asker.answer(DONE, START.pack(memory.ctypes.data) + agent.metadata)
        _serve(agent, asker)
    except Exception as error:  # NIXL's exceptions have no common base class
        with suppress(OSError):  # the service may be gone
            asker.answer(FAILED, str(error).encode())
    finally:
        os._exit(0)  # skips the shutdown of NIXL, which takes time and is not needed


def _serve(agent: NixlAgent, asker: Asker) -> None:
    interval_s: float | None = None
    while True:
        command = asker.command(interval_s)
        if command is None:
            agent.progress()
            continue
        kind, content = command[0], command[1:]
        if kind == CONNECT:
            agent.connect(content)
        elif kind == READ:
            ranges = np.frombuffer(content, np.uint64, offset=START.size).reshape(-1, 2)
            agent.read(ranges, START.unpack_from(content)[0])
        else:
            (interval_s,) = INTERVAL.unpack(content)
        asker.answer(DONE)


if __name__ == "__main__":
    main()
