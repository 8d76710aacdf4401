"""What the handoff needs of NIXL: memory registered with an agent, and reads of another agent's memory.

NIXL chooses the way: copies between processes of one host where the system lets it, else TCP or RDMA (UCX).

A read cannot be taken back. After NIXL has called one failed, released it and forgotten its peer, its bytes may still
be written as soon as the peer goes on (seen with 1.5.1 over TCP). Only the end of the agent ends that. So an agent
reads from one peer, and what it was to write into stays with it until it is closed.

Its own progress thread is not used: it polls without a pause, a whole core of each process.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

_POLL_INTERVAL_S = 0.0001
_HOST = "DRAM"


class NixlError(Exception):
    """It is not installed, or what was asked of it failed."""


class NixlAgent:
    """Not thread-safe. Everything raises NixlError when it fails."""

    def __init__(self) -> None:
        library = _library()
        config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self._agent: Any = library.nixl_agent(f"baton-{uuid4().hex}", config)
            created = "UCX" in self._agent.backends
        except Exception as error:  # its exceptions have no base of their own
            raise NixlError(f"no NIXL agent can be made: {error}") from error
        if not created:
            raise NixlError("this build of NIXL has no UCX")
        self._peer = ""
        self._transfers: list[Any] = []
        self._written: list[NDArray[np.uint8]] = []  # by these, or by one that failed

    @property
    def metadata(self) -> bytes:
        """What another agent needs to read the memory that is registered so far."""
        data: bytes = self._agent.get_agent_metadata()
        return data

    def register(self, address: int, num_bytes: int) -> None:
        """Let others read this memory of the host, and NIXL write into it, until the agent is closed."""
        self._register(address, num_bytes)

    def connect(self, metadata: bytes) -> None:
        """The peer, once, whose memory is read from now on."""
        assert not self._peer, "an agent reads from one peer"
        try:
            self._peer = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise NixlError(f"NIXL does not know the peer: {error}") from error

    def read(self, ranges: NDArray[np.uint64], into: NDArray[np.uint8], *, timeout_s: float) -> None:
        """Put the bytes of the peer's `ranges`, [N, 2] (address, number of bytes), one after the other into flat memory
        of as many. Blocks.

        After an error nothing more can be read, and `into` stays the agent's until `close`.
        """
        if self._written:
            raise NixlError("a NIXL read of this agent failed before")
        num_bytes = ranges[:, 1]
        starts = np.uint64(into.ctypes.data) + np.cumsum(num_bytes, dtype=np.uint64) - num_bytes
        self._written.append(into)
        failure = ""
        try:
            registered = self._register(into.ctypes.data, into.nbytes)
            self._transfer(self._on_host(starts, num_bytes), self._on_host(ranges[:, 0], num_bytes), timeout_s)
            self._agent.deregister_memory(registered)
        except Exception as error:
            failure = f"a NIXL read failed: {error}"
        if failure:  # raised here: an error that led to the transfer would keep it, and the agent, alive
            raise NixlError(failure)
        self._written.pop()

    def progress(self) -> None:
        """Serve reads of the peers, where the network's hardware does not."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Nothing is written any more, and nothing can be read here."""
        self._transfers.clear()
        self._agent = None  # and with the last reference it ends
        self._written.clear()

    def _register(self, address: int, num_bytes: int) -> object:
        try:
            return self._agent.register_memory([(address, num_bytes, 0, "")], _HOST)
        except Exception as error:
            raise NixlError(f"NIXL cannot register {num_bytes} bytes: {error}") from error

    def _on_host(self, addresses: NDArray[np.uint64], num_bytes: NDArray[np.uint64]) -> object:
        ranges = np.stack((addresses, num_bytes, np.zeros_like(num_bytes)), axis=1)
        return self._agent.get_xfer_descs(ranges, _HOST)

    def _transfer(self, into: object, of: object, timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        self._transfers.append(self._agent.initialize_xfer("READ", into, of, self._peer))
        state = self._agent.transfer(self._transfers[-1])
        while state == "PROC":
            if time.monotonic() > give_up_s:
                raise NixlError(f"it did not end within {timeout_s} s")
            time.sleep(_POLL_INTERVAL_S)
            state = self._agent.check_xfer_state(self._transfers[-1])
        if state != "DONE":
            raise NixlError(f"it ended as {state}")
        self._agent.release_xfer_handle(self._transfers.pop())


def _library() -> Any:
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise NixlError(f"NIXL is not installed (pip install 'baton-serve[nixl]'): {error}") from error
    return _api
