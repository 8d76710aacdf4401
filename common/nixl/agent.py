"""What the handoff needs of NIXL: memory registered with an agent, and reads of another agent's memory into it.

NIXL chooses the way: copies between processes of one host where the system allows it, else TCP or RDMA (UCX).

Only `transfer_process` loads this. NIXL's binding aborts a process in which other native libraries came first. And a
read cannot be taken back: after a read failed, was released and its peer forgotten, its bytes are still written when
the peer goes on (seen with 1.5.1 over TCP). Only the end of the process prevents that.

NIXL's own progress thread is not used, because it polls without a pause and takes a whole core.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

_POLL_INTERVAL_S = 0.0001
_HOST = "DRAM"


class NixlUnusable(Exception):
    """NIXL is not installed, or a call of it failed. This agent cannot be used any more."""


class NixlAgent:
    """Not thread-safe. `memory` [bytes] uint8 stays registered as long as the agent exists."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """Raises NixlUnusable."""
        try:
            from nixl_cu12 import _api as library  # a service without it must say so
        except ImportError as error:
            raise NixlUnusable(f"NIXL is not installed (pip install 'baton-serve[nixl]'): {error}") from error
        self._agent: Any = library.nixl_agent(
            f"baton-{uuid4().hex}", library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        if "UCX" not in self._agent.backends:
            raise NixlUnusable("this build of NIXL has no UCX")
        self._memory = memory
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], _HOST)
        self._peer = ""

    @property
    def metadata(self) -> bytes:
        """What another agent needs to read the memory."""
        data: bytes = self._agent.get_agent_metadata()
        return data

    def connect(self, metadata: bytes) -> None:
        """Use this peer's memory for later reads."""
        self._peer = self._agent.add_remote_agent(metadata)

    def read(self, ranges: NDArray[np.uint64], start: int) -> None:
        """Copy the bytes of the peer's `ranges`, [N, 2] (address, number of bytes), one after the other into the memory
        from `start` on. Blocks until done. Raises NixlUnusable.
        """
        num_bytes = ranges[:, 1]
        into = np.uint64(self._memory.ctypes.data + start) + np.cumsum(num_bytes, dtype=np.uint64) - num_bytes
        transfer = self._agent.initialize_xfer(
            "READ", self._on_host(into, num_bytes), self._on_host(ranges[:, 0], num_bytes), self._peer
        )
        state = self._agent.transfer(transfer)
        while state == "PROC":
            time.sleep(_POLL_INTERVAL_S)
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise NixlUnusable(f"a read ended as {state}")
        self._agent.release_xfer_handle(transfer)

    def progress(self) -> None:
        """Serve peers' reads, if the network's hardware does not."""
        self._agent.get_new_notifs()

    def _on_host(self, addresses: NDArray[np.uint64], num_bytes: NDArray[np.uint64]) -> object:
        ranges = np.stack((addresses, num_bytes, np.zeros_like(num_bytes)), axis=1)
        return self._agent.get_xfer_descs(ranges, _HOST)
