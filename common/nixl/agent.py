"""A thin wrapper of NIXL: it registers memory, and reads another agent's registered memory into it.

NIXL chooses the transport through UCX: direct copies between processes of one host if the system allows them, else TCP
or RDMA.

Only the process of `transfer_process` imports this module, for two reasons. NIXL's binding aborts a process that has
loaded certain other native libraries before it. And a failed read cannot be cancelled: its bytes may still be written
later, when the peer goes on (seen with NIXL 1.5.1 over TCP). Only ending the process prevents that.

NIXL's own progress thread is off, because it polls without a pause and takes a whole core.
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
    """NIXL is not installed, lacks UCX, or ended a read without success. The agent cannot be used any more."""


class NixlAgent:
    """A NIXL agent, which reads a peer's memory into its own `memory` and lets peers read it.

    `memory` [bytes] uint8 stays registered as long as the agent exists. Not thread-safe. Any method may also raise an
    exception of NIXL's own; these have no common base class.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """Starts the agent and registers `memory`. Raises NixlUnusable."""
        try:
            from nixl_cu12 import _api as library  # imported here, so that its absence is reported as NixlUnusable
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
        """The bytes that another agent needs to connect and read this agent's memory."""
        data: bytes = self._agent.get_agent_metadata()
        return data

    def connect(self, metadata: bytes) -> None:
        """Makes the agent with this metadata the peer of later reads."""
        self._peer = self._agent.add_remote_agent(metadata)

    def read(self, ranges: NDArray[np.uint64], start: int) -> None:
        """Copies ranges of the peer's memory into this agent's memory, one after the other, from offset `start` on.

        `ranges` is [N, 2]: (address, number of bytes). Blocks until done. Raises NixlUnusable.
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
        """Lets NIXL do its part in peers' reads of this memory, if the network hardware does not do it alone."""
        self._agent.get_new_notifs()

    def _on_host(self, addresses: NDArray[np.uint64], num_bytes: NDArray[np.uint64]) -> object:
        ranges = np.stack((addresses, num_bytes, np.zeros_like(num_bytes)), axis=1)
        return self._agent.get_xfer_descs(ranges, _HOST)
