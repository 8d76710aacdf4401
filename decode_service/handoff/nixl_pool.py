"""A prefill replica's KV pool, read through NIXL into memory of this process.

ticket ─▶ ranges of the replica's memory ─read─▶ payload ─▶ stamps read, compared ─▶ the loan ends, the engine lands it

It is not read into the engine's own pool: a read that is given up may still write (`common.nixl_agent`), and its slots
would be another row's by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.kv.layer_group import LayerGroupSpec
from common.kv.lent_pool import HEADER_BYTES, NUMBER_BYTES, PoolLayout, PoolUnusable, split_header
from common.kv.shared_kv import PoolTicket, RemoteKv, runs_of
from common.nixl_agent import NixlAgent, NixlError


class NixlPool:
    """Event loop only. Reads take turns on a thread of the pool's own."""

    def __init__(
        self,
        address: int,
        header: bytes,
        *,
        groups: Sequence[LayerGroupSpec],
        thread: ThreadPoolExecutor,
        reader: _Reader,
    ) -> None:
        """`header`: what the memory at `address` begins with. The thread and the reader are the pool's from now on."""
        self.secret, num_slots = split_header(header)
        self._address = address
        self._layout = PoolLayout(groups, num_slots)
        self._thread = thread
        self._reader = reader
        self.is_lost = False

    @classmethod
    async def opened(
        cls, offer: prefill_pb2.NixlPool, *, groups: Sequence[LayerGroupSpec], timeout_s: float
    ) -> NixlPool:
        """`groups` are the writer's, by its fingerprint. Raises PoolUnusable when it cannot be read from here: what its
        memory begins with is read.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="nixl")
        reader = _Reader(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                header = await asyncio.get_running_loop().run_in_executor(thread, reader.open, offer)
        except (NixlError, TimeoutError) as error:
            thread.submit(reader.close)
            thread.shutdown(wait=False)
            raise PoolUnusable(str(error) or f"NIXL took longer than {timeout_s} s") from error
        return cls(offer.address, header.tobytes(), groups=groups, thread=thread, reader=reader)

    @property
    def num_slots(self) -> int:
        return self._layout.num_slots

    def read(self, group_name: str, layers: slice, ticket: PoolTicket) -> RemoteKv | None:
        """Where the KV lies; None when there are no such slots. `layers` are some of the group's."""
        if not all(0 < slot <= self.num_slots for slot in ticket.slots):
            return None
        starts, lengths = (np.array(runs, np.uint64) for runs in runs_of(ticket.slots))
        _, num_planes, num_rows, row_bytes = self._layout.shapes[group_name]
        places = [
            layer * num_planes + plane for layer, plane in product(range(layers.start, layers.stop), range(num_planes))
        ]
        bases = self._address + self._layout.starts[group_name] + np.array(places, np.uint64) * num_rows * row_bytes
        return RemoteKv(
            ticket,
            kv=_ranges(bases, starts, lengths, row_bytes),
            stamps=_ranges(np.array([self._address + HEADER_BYTES], np.uint64), starts, lengths, NUMBER_BYTES),
        )

    async def fetch(self, remote: RemoteKv) -> NDArray[np.uint8] | None:
        """The KV's bytes; None when the slots were another row's before they were read. Raises NixlError, from then on
        always.
        """
        if self.is_lost:
            raise NixlError("the replica's memory was let go of")
        try:
            # Memory of this thread: what others allocate in such sizes goes back to the system when it is free.
            payload: NDArray[np.uint8] = np.empty(remote.num_bytes, np.uint8)
            loop = asyncio.get_running_loop()
            return payload if await loop.run_in_executor(self._thread, self._reader.fetch, remote, payload) else None
        except NixlError:
            self.is_lost = True
            raise

    def close(self) -> None:
        """Let go of the replica's memory, behind the read under way. Does not block."""
        self.is_lost = True
        self._thread.submit(self._reader.close)
        self._thread.shutdown(wait=False)


class _Reader:
    """The thread's side."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._agent: NixlAgent | None = None

    def open(self, offer: prefill_pb2.NixlPool) -> NDArray[np.uint8]:
        """Returns the header of the replica's memory."""
        self._agent = NixlAgent()
        self._agent.connect(offer.agent_metadata)
        header = np.empty(HEADER_BYTES, np.uint8)
        self._read(np.array([[offer.address, HEADER_BYTES]], np.uint64), header)
        return header

    def fetch(self, remote: RemoteKv, payload: NDArray[np.uint8]) -> bool:
        """Whether the slots were the row's until all was read."""
        stamps = np.empty(len(remote.ticket.slots), np.uint64)
        self._read(remote.kv, payload)
        self._read(remote.stamps, stamps.view(np.uint8))
        return bool((stamps == remote.ticket.generation).all())

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _read(self, ranges: NDArray[np.uint64], into: NDArray[np.uint8]) -> None:
        if self._agent is None:
            raise NixlError("the replica's memory was let go of")
        self._agent.read(ranges, into, timeout_s=self._timeout_s)


def _ranges(
    bases: NDArray[np.uint64], starts: NDArray[np.uint64], lengths: NDArray[np.uint64], item_bytes: int
) -> NDArray[np.uint64]:
    """[bases * runs, 2]: the address and the bytes of each run of items behind each base."""
    addresses = bases[:, None] + starts * np.uint64(item_bytes)
    num_bytes = np.broadcast_to(lengths * np.uint64(item_bytes), addresses.shape)
    return np.stack((addresses.ravel(), num_bytes.ravel()), axis=1)
