"""Reads a prefill replica's KV pool through NIXL (a GPU and RDMA transfer library), which runs in a process of its own.

ticket ─▶ ranges of the replica's memory ─read KV, then stamps─▶ staging ─▶ the engine's landing copies

Each slot of the replica's pool has a stamp, a number that changes when the slot is given to another row. A read returns
SharedKv, as if the pool were mapped; its stamps show whether the slots still held the segment's KV. KV is not read
directly into the engine's own pool: an abandoned read may still write until its process has ended
(`common.nixl.agent`), and its slots could belong to another row by then. Each NixlPool has staging memory of its own.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product

import numpy as np
from numpy.typing import NDArray

from baton.v1 import prefill_pb2
from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_kv import MAX_LENT_BYTES, PoolLost, PoolTicket, RemoteKv, SharedKv, runs_of
from common.kv.shared_pool import HEADER_BYTES, NUMBER_BYTES, PoolLayout, PoolUnusable, split_header
from common.nixl.child import NixlError, TransferProcess

_STAGING_BYTES = 2 * MAX_LENT_BYTES + (1 << 20)
"""The size of the staging memory: one segment is read while another lands, each with its stamps."""


class Staging:
    """Memory that another process writes and this one reads, given out in ranges.

    For the event loop only, but any thread may release a range.
    """

    def __init__(self, num_bytes: int) -> None:
        """Creates the memory. Raises OSError if it cannot. Pages that are never written use no memory."""
        self.num_bytes = num_bytes
        self.file = os.memfd_create("baton-staging")
        try:
            os.ftruncate(self.file, num_bytes)
            self._memory = mmap.mmap(self.file, num_bytes)
        except OSError:
            os.close(self.file)
            raise
        self._held: dict[int, int] = {}  # maps each held range's start to its stop
        self._came_back = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def take(self, num_bytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Waits for a free range. Returns its offset and its memory [num_bytes].

        The range is released when nothing references the memory any more. Only one task may wait at a time.
        """
        assert num_bytes <= self.num_bytes, "there is never so much"
        while (start := self._first_fit(num_bytes)) is None:
            self._came_back.clear()
            await self._came_back.wait()
        self._held[start] = start + num_bytes
        taken = np.frombuffer(self._memory, np.uint8, num_bytes, start)  # views of the array reference it
        weakref.finalize(taken, self._come_back, start).atexit = False
        return start, taken

    def close(self) -> None:
        """Closes the memory's file, so that no further process can map it. Ranges given out stay valid."""
        os.close(self.file)

    def _first_fit(self, num_bytes: int) -> int | None:
        start = 0
        for held_start, held_stop in sorted(self._held.items()):
            if start + num_bytes <= held_start:
                break
            start = held_stop
        return start if start + num_bytes <= self.num_bytes else None

    def _come_back(self, start: int) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._give_back, start)

    def _give_back(self, start: int) -> None:
        del self._held[start]
        self._came_back.set()


class NixlPool:
    """Reads KV from one replica's pool through NIXL, one read at a time. For the event loop only.

    The pool counts as lost after the first failed read.
    """

    def __init__(
        self,
        *,
        address: int,
        header: bytes,
        groups: Sequence[LayerGroupSpec],
        process: TransferProcess,
        staging: Staging,
    ) -> None:
        """Wraps a pool that lies at `address` of the replica's memory and begins with the bytes `header`.

        The object owns `process` from now on, and ends it.
        """
        self.secret, num_slots, num_window_slots = split_header(header)
        self._has_failed = False
        self._address = address
        self._layout = PoolLayout(groups, num_slots, num_window_slots)
        self._process = process
        self._staging = staging
        self._turn = asyncio.Lock()
        self._num_users = 0
        self._is_retired = False

    @classmethod
    async def opened(
        cls, offer: prefill_pb2.NixlPool, *, groups: Sequence[LayerGroupSpec], timeout_s: float
    ) -> NixlPool:
        """Opens the pool that the replica offers, and reads its header. `timeout_s` bounds this and each later read.

        `groups` are the layer groups that the replica's fingerprint names. Raises PoolUnusable if the pool cannot be
        read from here.
        """
        try:
            staging = Staging(_STAGING_BYTES)
        except OSError as error:
            raise PoolUnusable(f"there is no memory to read into: {error}") from error
        process = None
        try:
            process = await TransferProcess.started(staging.file, timeout_s=timeout_s)
            await process.connect(offer.agent_metadata)
            start, header = await staging.take(HEADER_BYTES)
            await process.read(np.array([[offer.address, HEADER_BYTES]], np.uint64), start)
            return cls(address=offer.address, header=header.tobytes(), groups=groups, process=process, staging=staging)
        except NixlError as error:
            raise PoolUnusable(str(error)) from error
        except BaseException:
            if process is not None:
                await process.close()
            raise
        finally:
            staging.close()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Counts as a use of the pool while the block runs: until its end the pool can be read, even if it is retired
        meanwhile.
        """
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._end_if_unused()

    def retire(self) -> None:
        """Retires the pool: it gets no new user and ends after the last one."""
        self._is_retired = True
        self._end_if_unused()

    @property
    def is_lost(self) -> bool:
        """Whether the pool cannot be read any more."""
        return self._has_failed or not self._process.is_usable

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    async def close(self) -> None:
        """Ends the pool's process. The pool must not be used afterwards."""
        await self._process.close()

    def read(self, group_name: str, layers: slice, ticket: PoolTicket) -> RemoteKv | None:
        """Returns where the KV of the ticket's slots lies in the replica's memory. Reads nothing: `fetch` does.

        Returns None if the pool has no such slots. `layers` is a range of the group's layers.
        """
        _, num_planes, num_rows, row_bytes = self._layout.shapes[group_name]
        if not ticket.is_of(num_rows - 1):
            return None
        starts, lengths = (np.array(runs, np.uint64) for runs in runs_of(ticket.slots))
        planes = [
            layer * num_planes + plane for layer, plane in product(range(layers.start, layers.stop), range(num_planes))
        ]
        stamps_at = self._address + self._layout.stamp_starts[group_name]
        bases = self._address + self._layout.starts[group_name] + np.array(planes, np.uint64) * num_rows * row_bytes
        return RemoteKv(
            ticket,
            shape=(layers.stop - layers.start, num_planes, len(ticket.slots), row_bytes),
            kv=_ranges(bases, starts, lengths, row_bytes),
            stamps=_ranges(np.array([stamps_at], np.uint64), starts, lengths, NUMBER_BYTES),
            fetch=self.fetch,
        )

    async def fetch(self, remote: RemoteKv) -> SharedKv:
        """Reads the KV of one segment (at most MAX_LENT_BYTES) into memory of this process, and then its slots' stamps.

        The stamps show whether the replica reused the slots meanwhile. Raises PoolLost if the read fails, and on every
        call after that. If the task is cancelled while it reads, the read goes on and keeps its memory until it has
        ended. A read that has not begun is dropped.
        """
        stamps_at = -(-remote.num_bytes // NUMBER_BYTES) * NUMBER_BYTES
        await self._turn.acquire()
        try:
            if self.is_lost:
                raise PoolLost("NIXL: the replica's memory was let go of")
            start, taken = await self._staging.take(stamps_at + len(remote.ticket.slots) * NUMBER_BYTES)
        except BaseException:
            self._turn.release()
            raise
        return await asyncio.shield(asyncio.ensure_future(self._read(remote, start, taken, stamps_at)))

    async def _read(self, remote: RemoteKv, start: int, taken: NDArray[np.uint8], stamps_at: int) -> SharedKv:
        """Reads KV and stamps into the staging memory from offset `start` on, then lets the next read begin.

        `taken` is that range of the memory; the stamps lie `stamps_at` bytes after its start.
        """
        kv_bytes, num_tokens = remote.num_bytes, len(remote.ticket.slots)
        try:
            await self._process.read(remote.kv, start)
            await self._process.read(remote.stamps, start + stamps_at)
        except NixlError as error:
            self._has_failed = True
            raise PoolLost(str(error)) from error
        finally:
            self._turn.release()
        stamps = taken[stamps_at:].view(np.uint64)
        ticket = PoolTicket(tuple(range(num_tokens)), remote.ticket.generation, remote.ticket.number)
        return SharedKv(ticket, taken[:kv_bytes].reshape(remote.shape), stamps)

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._num_users:
            self._process.kill()


def _ranges(
    bases: NDArray[np.uint64], starts: NDArray[np.uint64], lengths: NDArray[np.uint64], item_bytes: int
) -> NDArray[np.uint64]:
    """Returns the address and byte size of each run of items at each base address: [bases * runs, 2].

    Run i begins `starts[i]` items after the base and has `lengths[i]` items of `item_bytes`.
    """
    addresses = bases[:, None] + starts * np.uint64(item_bytes)
    num_bytes = np.broadcast_to(lengths * np.uint64(item_bytes), addresses.shape)
    return np.stack((addresses.ravel(), num_bytes.ravel()), axis=1)
