"""Shared memory that a KV pool lies in, so that a decode service copies from there into its own.

The prefill service makes it, and alone is to write. A decode service on the same host maps it for reading: it is a file
in memory that only its own user may open. Or NIXL reads it: its process inherits memory without a name, and registers
it as UCX does, so that a peer that is no decode service of ours could write, too (docs/security.md).
Each slot has a stamp: the number of the row, of all rows there ever were, that it belongs to.

    | secret | number of slots | stamp of each slot ... | layer group | layer group ...
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.available_memory import require_room
from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_kv import PoolTicket, SharedKv
from common.kv.slot_allocator import Slots

SECRET_BYTES = 16
NUMBER_BYTES = 8
HEADER_BYTES = SECRET_BYTES + NUMBER_BYTES
DIRECTORY = Path("/dev/shm")
_MAX_NAMES = 8
_PREFIX = "baton-kv-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")
_PAGE_BYTES = 4096


class PoolUnusable(Exception):
    """There is no such memory here, or it is not one that this process may trust."""


class PoolLayout:
    """Where everything is. `groups` [layers, planes, slots + 1, row_bytes]; slot 0 is padding, and nobody's."""

    def __init__(self, groups: Sequence[LayerGroupSpec], num_slots: int) -> None:
        self.num_slots = num_slots
        self.shapes = {
            group.name: (group.num_layers, group.num_planes, num_slots + 1, group.row_bytes) for group in groups
        }
        self.starts: dict[str, int] = {}
        """Of each group, in bytes from the beginning."""
        end = HEADER_BYTES + (num_slots + 1) * NUMBER_BYTES
        for name, (num_layers, num_planes, num_rows, row_bytes) in self.shapes.items():
            self.starts[name] = -(-end // _PAGE_BYTES) * _PAGE_BYTES
            end = self.starts[name] + num_layers * num_planes * num_rows * row_bytes
        self.file_bytes = end

    def stamps(self, memory: mmap.mmap) -> NDArray[np.uint64]:
        return np.frombuffer(memory, np.uint64, self.num_slots + 1, HEADER_BYTES)

    def group(self, memory: mmap.mmap, name: str) -> NDArray[np.uint8]:
        shape = self.shapes[name]
        return np.frombuffer(memory, np.uint8, int(np.prod(shape)), self.starts[name]).reshape(shape)


def split_header(header: bytes) -> tuple[bytes, int]:
    """The secret and the number of slots."""
    return header[:SECRET_BYTES], int.from_bytes(header[SECRET_BYTES:HEADER_BYTES], "little")


class SharedPool:
    """The writer's side. Not thread-safe. The memory stays as long as anything that it gave out."""

    def __init__(self, *, groups: Sequence[LayerGroupSpec], num_slots: int, directory: Path | None = DIRECTORY) -> None:
        """`directory`: None for memory without a name. Raises OSError when there is no room for it."""
        self._path: Path | None = None
        if directory is None:
            self.file = os.memfd_create("baton-kv")
        else:
            self._path, self.file = _new_file(directory)
        try:
            layout = PoolLayout(groups, num_slots)
            require_room(layout.file_bytes)
            os.posix_fallocate(self.file, 0, layout.file_bytes)  # a page that is missing later would be a SIGBUS
            memory = mmap.mmap(self.file, layout.file_bytes)
        except BaseException:
            self.close()
            raise
        self.secret = secrets.token_bytes(SECRET_BYTES)
        memory[:HEADER_BYTES] = self.secret + num_slots.to_bytes(NUMBER_BYTES, "little")
        self.groups = {group.name: layout.group(memory, group.name) for group in groups}
        """[layers, planes, num_slots + 1, row_bytes] uint8, zeros at first."""
        self._stamps = layout.stamps(memory)
        self._num_stamped = 0
        self._num_tickets = 0

    @property
    def name(self) -> str:
        """Empty without one."""
        return "" if self._path is None else self._path.name

    @property
    def num_slots(self) -> int:
        return len(self._stamps) - 1

    def stamp(self, slots: Sequence[int] | Slots) -> int:
        """Give these slots to a row. Whoever read there for another row learns it. Returns the row's generation."""
        self._num_stamped += 1
        self._stamps[np.asarray(slots)] = self._num_stamped
        return self._num_stamped

    def lend(self, group_name: str, layers: slice, slots: Sequence[int] | Slots, generation: int) -> SharedKv:
        """KV of a row that `stamp` gave the slots to, for a receiver to read."""
        self._num_tickets += 1
        ticket = PoolTicket(tuple(np.asarray(slots).tolist()), generation, self._num_tickets)
        return SharedKv(ticket, self.groups[group_name][layers], self._stamps)

    def close(self) -> None:
        """The file is gone; whoever has mapped it keeps the memory until it lets go. Idempotent."""
        if self.file >= 0:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            os.close(self.file)
            self.file = -1


def _new_file(directory: Path) -> tuple[Path, int]:
    """Its path and descriptor, locked for as long as this process lives. Raises OSError."""
    for _ in range(_MAX_NAMES):
        path = directory / f"{_PREFIX}{secrets.token_hex(16)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # somebody swept before it was locked
    raise OSError(f"{_MAX_NAMES} new files were removed from {directory} at once")


def _open_own(path: Path) -> int:
    """A descriptor for reading, at once: the directory is everybody's, and to open a FIFO is to wait for its writer.

    Raises OSError, also where it is no regular file of this user.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return file
    os.close(file)
    raise OSError(errno.EPERM, "not a file of this user")


class MappedPool:
    """The reader's side. It cannot write, and the memory stays as long as anything that it gave out."""

    def __init__(self, name: str, *, groups: Sequence[LayerGroupSpec], directory: Path = DIRECTORY) -> None:
        """`groups` are the writer's, by its fingerprint.

        Raises PoolUnusable when it cannot be mapped here: on another host, in another container, of another user.
        """
        if not _NAME.fullmatch(name):
            raise PoolUnusable(f"{name!r} is not the name of a pool")
        try:
            file = _open_own(directory / name)
            try:
                memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise PoolUnusable(f"{name} cannot be mapped: {error}") from error
        self.secret, num_slots = split_header(memory[:HEADER_BYTES])
        layout = PoolLayout(groups, num_slots)
        if layout.file_bytes != len(memory):
            raise PoolUnusable(f"{name} has {len(memory)} bytes instead of {layout.file_bytes}")
        self._groups = {group.name: layout.group(memory, group.name) for group in groups}
        self._stamps = layout.stamps(memory)

    @property
    def num_slots(self) -> int:
        return len(self._stamps) - 1

    def read(self, group_name: str, layers: slice, ticket: PoolTicket) -> SharedKv | None:
        """The KV, whether current or not; None when there are no such slots. `layers` are some of the group's."""
        if not ticket.is_of(self.num_slots):
            return None
        return SharedKv(ticket, self._groups[group_name][layers], self._stamps)


def sweep(directory: Path = DIRECTORY) -> int:
    """Remove the files of this user whose processes were killed. Returns their number."""
    num_removed = 0
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            file = _open_own(path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_removed += 1
            finally:
                os.close(file)
    return num_removed
