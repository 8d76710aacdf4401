"""Shared memory through which KV goes from a prefill service to a decode service on the same host.

The prefill service makes it, as a file in memory that only its own user may open, and alone writes. A decode service
maps it for reading. A segment's KV lies in whole blocks; each block has a stamp, the number of the slot that it belongs
to now.

    | secret | stamp of each block ... | block | block | block | ...
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 64 << 10
SECRET_BYTES = 16
DIRECTORY = Path("/dev/shm")
_PREFIX = "baton-kv-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")
_STAMP_BYTES = 8
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SlotTicket:
    """Where a segment's KV lies: `num_bytes` from `offset`. `generation` is never used again in the same ring."""

    offset: int
    num_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class RingSlot:
    """`payload` [num_bytes] uint8 in the ring; `stamps` of its blocks [blocks] uint64."""

    ticket: SlotTicket
    payload: NDArray[np.uint8]
    stamps: NDArray[np.uint64]

    @property
    def is_current(self) -> bool:
        """Whether no other segment was put there. What was read before counts only if this still holds."""
        return bool((self.stamps == self.ticket.generation).all())


class RingUnusable(Exception):
    """There is no such ring here, or it is not one that this process may trust."""


class _Layout:
    """Views of a ring's memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.num_blocks = len(memory) // BLOCK_BYTES  # less what the header takes: part of a block or more
        while _file_bytes(self.num_blocks * BLOCK_BYTES) > len(memory):
            self.num_blocks -= 1
        everything = np.frombuffer(memory, np.uint8)
        self.secret = everything[:SECRET_BYTES]
        self.stamps = everything[SECRET_BYTES:][: self.num_blocks * _STAMP_BYTES].view(np.uint64)
        self.data = everything[_header_bytes(self.num_blocks) :][: self.num_blocks * BLOCK_BYTES]

    def slot(self, ticket: SlotTicket) -> RingSlot:
        first = ticket.offset // BLOCK_BYTES
        payload = self.data[ticket.offset : ticket.offset + ticket.num_bytes]
        return RingSlot(ticket, payload, self.stamps[first : first + num_blocks(ticket.num_bytes)])


class KvRing:
    """The writer's side. Not thread-safe. The lowest free place is taken: it was used last, and is in the caches."""

    def __init__(self, *, num_bytes: int, directory: Path = DIRECTORY) -> None:
        """`num_bytes` are for segments; stamps come on top. Raises OSError when there is no room for it."""
        self._path = directory / f"{_PREFIX}{secrets.token_hex(16)}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # for as long as this process lives
            file_bytes = _file_bytes(num_bytes)
            os.posix_fallocate(self._file, 0, file_bytes)  # a page that is missing later would be a SIGBUS
            self._layout = _Layout(mmap.mmap(self._file, file_bytes))
        except BaseException:
            self.close()
            raise
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._layout.secret[:] = np.frombuffer(self.secret, np.uint8)
        self._free = {0: self._layout.num_blocks} if self._layout.num_blocks else {}  # first block: number of blocks
        self._num_taken = 0

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def num_free_bytes(self) -> int:
        return sum(self._free.values()) * BLOCK_BYTES

    @property
    def num_bytes(self) -> int:
        """What segments can use of it."""
        return self._layout.num_blocks * BLOCK_BYTES

    def take(self, num_bytes: int) -> RingSlot | None:
        """Room for a segment, or None when there is none. What lay there before is not current from now on."""
        wanted = num_blocks(num_bytes)
        first = next((first for first in sorted(self._free) if self._free[first] >= wanted), None)
        if first is None:
            return None
        left = self._free.pop(first) - wanted
        if left:
            self._free[first + wanted] = left
        self._num_taken += 1
        slot = self._layout.slot(SlotTicket(first * BLOCK_BYTES, num_bytes, self._num_taken))
        slot.stamps[:] = self._num_taken
        return slot

    def give_back(self, slot: RingSlot) -> None:
        first, length = slot.ticket.offset // BLOCK_BYTES, len(slot.stamps)
        before = max((start for start in self._free if start <= first), default=None)
        if before is not None and before + self._free[before] >= first:
            assert before + self._free[before] == first, f"slot {slot.ticket.generation} came back twice"
            first, length = before, self._free[before] + length
        self._free[first] = length + self._free.pop(first + length, 0)

    def close(self) -> None:
        """The file is gone; whoever has mapped it keeps the memory until it lets go. Idempotent."""
        if self._file >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            os.close(self._file)
            self._file = -1


class MappedRing:
    """The reader's side. It cannot write, and the memory stays as long as anything that it gave out."""

    def __init__(self, name: str, *, directory: Path = DIRECTORY) -> None:
        """Raises RingUnusable when it cannot be mapped here: on another host, in another container, of another user."""
        if not _NAME.fullmatch(name):
            raise RingUnusable(f"{name!r} is not the name of a ring")
        try:
            file = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                    raise RingUnusable(f"{name} is not a file of this user")
                self._layout = _Layout(mmap.mmap(file, 0, prot=mmap.PROT_READ))
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise RingUnusable(f"{name} cannot be mapped: {error}") from error
        self.secret = self._layout.secret.tobytes()

    def slot(self, ticket: SlotTicket) -> RingSlot | None:
        """The slot, or None when the ticket is not of one that is there now."""
        is_inside = 0 < ticket.num_bytes <= self._layout.data.nbytes - ticket.offset
        if not is_inside or ticket.offset % BLOCK_BYTES:
            return None
        slot = self._layout.slot(ticket)
        return slot if slot.is_current else None


def _header_bytes(num_blocks: int) -> int:
    return -(-(SECRET_BYTES + num_blocks * _STAMP_BYTES) // _PAGE_BYTES) * _PAGE_BYTES


def _file_bytes(num_bytes: int) -> int:
    return _header_bytes(num_blocks(num_bytes)) + num_blocks(num_bytes) * BLOCK_BYTES


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def sweep(directory: Path = DIRECTORY) -> int:
    """Remove the files of this user whose processes were killed. Returns their number."""
    num_removed = 0
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_removed += 1
            finally:
                os.close(file)
    return num_removed
