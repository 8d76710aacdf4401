"""The process that NIXL lives in: `python -m common.nixl.transfer_process FILE TIMEOUT_S`, a service's child.

It maps the memory FILE (a descriptor that it inherits), says where, and does what it is asked
(see `common.host.answering`):

    command  | kind: u8 | content |      answer  DONE, or FAILED and why

    CONNECT  metadata of the peer's agent
    READ     u64: where in the memory; u64, u64 for each range of the peer's memory: address, bytes
    SERVE    f64: seconds between looks for what peers want of this memory

The first answer comes unasked: u64 address of the memory, then the agent's metadata. The process also ends with the
first failure, and where a look takes longer than TIMEOUT_S.
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
    file, asker = int(sys.argv[1]), Asker(float(sys.argv[2]))
    logging.disable(logging.INFO)
    try:
        memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        agent = NixlAgent(memory)
        asker.answer(DONE, START.pack(memory.ctypes.data) + agent.metadata)
        _serve(agent, asker)
    except Exception as error:  # NIXL's errors have no common base
        with suppress(OSError):  # the service may be gone
            asker.answer(FAILED, str(error).encode())
    finally:
        os._exit(0)  # nobody needs to wait for the library's own shutdown


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
