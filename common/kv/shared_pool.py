"""Shared memory for a prefill service's KV pool, from which a decode service copies KV into its own pool.

The prefill service creates the memory and is the only writer. The memory has no name, so the operating system frees it
with the last process that uses it, however that process ends. There are two ways to read it:

- A decode service on the same host connects to a socket. If it runs as the same user, it gets a read-only descriptor.
- NIXL's process inherits the memory and registers it with UCX. UCX also permits writing, so a malicious peer could
  write to it (docs/security.md).

Each slot has a stamp, a number that is new each time the slot is given to a row. A reader that finds a newer stamp
knows that the slot was reused. Layer groups with a window have slots of their own. The memory begins with a random
secret: a decode service that sends it in a call shows that it can read the pool.

    | secret | number of slots | number of a window group's slots | stamp of each slot ... | layer group ...
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.host.memory import require_room
from common.kv.layer_group import LayerGroupSpec
from common.kv.shared_kv import PoolTicket, SharedKv
from common.kv.slot_allocator import Slots
from common.peer_text import peer_text

SECRET_BYTES = 16
NUMBER_BYTES = 8
HEADER_BYTES = SECRET_BYTES + 2 * NUMBER_BYTES
DIRECTORY = Path("/dev/shm")
"""The directory in which the sockets lie."""
_PREFIX = "baton-kv-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")
_PAGE_BYTES = 4096
_SEAL = getattr(fcntl, "F_SEAL_SHRINK", 0)  # exists only on Linux, which this module needs
"""The seal that forbids shrinking the memory. A process that reads mapped memory after it shrank would crash."""
ANSWER_TIMEOUT_S = 2.0
_ACCEPT_RETRY_S = 0.1
_CREDENTIALS = struct.Struct("3i")


_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ETOOMANYREFS})


class PoolUnusable(Exception):
    """The pool cannot be mapped: it does not exist on this host, or this process must not trust it."""

    @property
    def may_pass(self) -> bool:
        """Whether a process lacked time, descriptors or memory, so that another try may succeed."""
        cause = self.__cause__
        return isinstance(cause, TimeoutError) or (isinstance(cause, OSError) and cause.errno in _PASSING)


class PoolLayout:
    """The layout of the shared memory: where the stamps and each layer group's KV lie.

    A group's KV is [layers, planes, slots + 1, row_bytes] uint8; slot 0 is padding. `num_slots` and `num_window_slots`
    count the slots of groups without and with a window.
    """

    def __init__(self, groups: Sequence[LayerGroupSpec], num_slots: int, num_window_slots: int) -> None:
        self.shapes = {
            group.name: (
                group.num_layers,
                group.num_planes,
                (num_window_slots if group.window else num_slots) + 1,
                group.row_bytes,
            )
            for group in groups
        }
        self.stamp_starts = {group.name: HEADER_BYTES for group in groups}
        """The start of the stamps of each group's slots, in bytes. Groups without a window share slots and stamps."""
        self.starts: dict[str, int] = {}
        """The start of each group, in bytes from the beginning of the memory."""
        end = HEADER_BYTES + (num_slots + 1) * NUMBER_BYTES
        for group in groups:
            if group.window:
                self.stamp_starts[group.name] = end
                end += (num_window_slots + 1) * NUMBER_BYTES
        for name, (num_layers, num_planes, num_rows, row_bytes) in self.shapes.items():
            self.starts[name] = -(-end // _PAGE_BYTES) * _PAGE_BYTES
            end = self.starts[name] + num_layers * num_planes * num_rows * row_bytes
        self.file_bytes = end

    def stamps(self, memory: mmap.mmap, name: str) -> NDArray[np.uint64]:
        """Returns the stamps of all slots of the group `name`, [slots + 1], as a view of `memory`."""
        return np.frombuffer(memory, np.uint64, self.shapes[name][2], self.stamp_starts[name])

    def group(self, memory: mmap.mmap, name: str) -> NDArray[np.uint8]:
        """Returns the KV of the group `name`, [layers, planes, slots + 1, row_bytes], as a view of `memory`."""
        shape = self.shapes[name]
        return np.frombuffer(memory, np.uint8, int(np.prod(shape)), self.starts[name]).reshape(shape)


def split_header(header: bytes) -> tuple[bytes, int, int]:
    """Returns the pool's secret and its numbers of slots, as PoolLayout takes them, from the first HEADER_BYTES of its
    memory.

    The secret is random bytes. A reader sends them to the pool's owner, to show that it can read the pool.
    """
    numbers_at = (SECRET_BYTES, SECRET_BYTES + NUMBER_BYTES)
    num_slots, num_window_slots = (int.from_bytes(header[at : at + NUMBER_BYTES], "little") for at in numbers_at)
    return header[:SECRET_BYTES], num_slots, num_window_slots


class SharedPool:
    """The shared memory of a KV pool, on the side of the process that creates and writes it.

    Not thread-safe. The memory lives as long as an object refers to it.
    """

    def __init__(
        self,
        *,
        groups: Sequence[LayerGroupSpec],
        num_slots: int,
        num_window_slots: int = 0,
        directory: Path | None = DIRECTORY,
    ) -> None:
        """Creates the memory, and a socket in `directory` that gives it to readers (none if `directory` is None).

        `num_slots` and `num_window_slots` count the slots of groups without and with a window. Raises OSError if there
        is not enough memory, or the operating system is not Linux.
        """
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, f"not known of {sys.platform}")
        self.file = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._door: _Door | None = None
        try:
            layout = PoolLayout(groups, num_slots, num_window_slots)
            require_room(layout.file_bytes)
            os.posix_fallocate(self.file, 0, layout.file_bytes)  # else a lack of memory later would be a SIGBUS
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEAL)
            memory = mmap.mmap(self.file, layout.file_bytes)
            if directory is not None:
                self._door = _Door(self.file, directory)
        except BaseException:
            self.close()
            raise
        self.secret = secrets.token_bytes(SECRET_BYTES)
        numbers = (number.to_bytes(NUMBER_BYTES, "little") for number in (num_slots, num_window_slots))
        memory[:HEADER_BYTES] = self.secret + b"".join(numbers)
        self.memory = np.frombuffer(memory, np.uint8)
        """All bytes of the file."""
        self.groups = {group.name: layout.group(memory, group.name) for group in groups}
        """The KV of each group, [layers, planes, slots + 1, row_bytes] uint8, zeros at first."""
        self.num_slots = num_slots
        self._stamps = {group.name: layout.stamps(memory, group.name) for group in groups}
        self._num_stamped = 0
        self._num_tickets = 0

    @property
    def name(self) -> str:
        """The name of the socket, or "" if there is none."""
        return "" if self._door is None else self._door.name

    def stamp(self, group_name: str, slots: Sequence[int] | Slots) -> None:
        """Gives all `slots` of a group the same new stamp. Call it when a row gets these slots.

        A reader that still reads them for an earlier row notices the change. Groups without a window share stamps.
        """
        self._num_stamped += 1
        self._stamps[group_name][np.asarray(slots)] = self._num_stamped

    def lend(self, group_name: str, layers: slice, slots: Sequence[int] | Slots) -> SharedKv:
        """Returns the KV of a group's `layers` in a row's `slots`, with a new ticket, for a receiver to read.

        The row must hold the slots now: every stamp that is newer than this call says that they were reused.
        """
        self._num_tickets += 1
        ticket = PoolTicket(tuple(np.asarray(slots).tolist()), self._num_stamped, self._num_tickets)
        return SharedKv(ticket, self.groups[group_name][layers], self._stamps[group_name])

    def close(self) -> None:
        """Closes the socket, so that there are no new readers. Present readers keep the memory. A second call does
        nothing.
        """
        if self._door is not None:
            self._door.close()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class _Door:
    """A socket from which other processes of this user get a read-only descriptor of `file`. A thread serves it."""

    def __init__(self, file: int, directory: Path) -> None:
        """Opens the socket in `directory` under a new random name, and starts the thread. Raises OSError."""
        self.name = f"{_PREFIX}{secrets.token_hex(16)}"
        self._directory = directory
        self._is_closed = threading.Event()
        self._listening = socket.socket(socket.AF_UNIX)
        try:
            self._file = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
        except OSError:
            self._listening.close()
            raise
        try:
            unswept = f".{self.name}"  # `sweep` would delete a socket that does not listen yet
            with _reachable(directory, unswept) as address:
                self._listening.bind(address)
            (directory / unswept).chmod(0o600)
            self._listening.listen()
            (directory / unswept).rename(directory / self.name)
            self._thread = threading.Thread(target=self._serve, name="kv-pool", daemon=True)
            self._thread.start()
        except BaseException:
            self._listening.close()
            os.close(self._file)
            raise

    def close(self) -> None:
        """Deletes the socket and ends the thread. A second call does nothing."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        (self._directory / self.name).unlink(missing_ok=True)
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listening.close()
        os.close(self._file)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listening.accept()
            except OSError:  # the socket is closed, or this process has no descriptors left
                if self._is_closed.wait(_ACCEPT_RETRY_S):
                    return
                continue
            with peer, contextlib.suppress(OSError):
                if user_of(peer) == os.geteuid():
                    peer.settimeout(ANSWER_TIMEOUT_S)
                    socket.send_fds(peer, [b"\0"], [self._file])


def user_of(peer: socket.socket) -> int:
    """Returns the id of the user whose process is at the other end of a UNIX socket."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


@contextlib.contextmanager
def _reachable(directory: Path, name: str) -> Iterator[str]:
    """Yields a short path to the socket `name` in `directory`, even if the directory's own path is long.

    The operating system limits the length of a socket's path.
    """
    file = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{file}/{name}"
    finally:
        os.close(file)


def _asked_for(name: str, directory: Path) -> int:
    """Connects to the socket `name` and returns a read-only descriptor of the pool's memory.

    Raises OSError, also if the pool cannot be trusted: it belongs to another user, or its memory may shrink.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        with _reachable(directory, name) as address:
            connection.connect(address)
        if user_of(connection) != os.geteuid():
            raise PermissionError(errno.EPERM, "it is not of this user")
        _, files, flags, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not files and flags & socket.MSG_CTRUNC:  # this process has no descriptor for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not files:
        raise PermissionError(errno.EPERM, "it was refused")
    try:
        if not fcntl.fcntl(files[0], fcntl.F_GET_SEALS) & _SEAL:
            raise PermissionError(errno.EPERM, "its memory may be made smaller")
    except OSError:
        os.close(files[0])
        raise
    return files[0]


class MappedPool:
    """The shared memory of another process's KV pool, mapped read-only.

    The memory lives as long as an object refers to it.
    """

    def __init__(self, name: str, *, groups: Sequence[LayerGroupSpec], directory: Path = DIRECTORY) -> None:
        """Maps the pool whose socket is `name`. `groups` are the layer groups of the writer's pool.

        Waits at most two seconds for the writer's answer. Raises PoolUnusable if the pool cannot be mapped here, for
        example because it is on another host, in another container or of another user.
        """
        if not _NAME.fullmatch(name):
            raise PoolUnusable(f"{peer_text(name)!r} is not the name of a pool")
        if sys.platform != "linux":
            raise PoolUnusable(f"{name} cannot be mapped: not known of {sys.platform}")
        try:
            file = _asked_for(name, directory)
            try:
                memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise PoolUnusable(f"{name} cannot be mapped: {error}") from error
        self.secret, num_slots, num_window_slots = split_header(memory[:HEADER_BYTES])
        layout = PoolLayout(groups, num_slots, num_window_slots)
        if layout.file_bytes != len(memory):
            raise PoolUnusable(f"{name} has {len(memory)} bytes instead of {layout.file_bytes}")
        self._groups = {group.name: layout.group(memory, group.name) for group in groups}
        self._stamps = {group.name: layout.stamps(memory, group.name) for group in groups}

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def read(self, group_name: str, layers: slice, ticket: PoolTicket) -> SharedKv | None:
        """Returns the KV of a segment: the layers `layers` of a group, in the ticket's slots.

        Returns None if the pool has no such slots. Does not check whether the slots still belong to the segment's row.
        """
        stamps = self._stamps[group_name]
        return SharedKv(ticket, self._groups[group_name][layers], stamps) if ticket.is_of(len(stamps) - 1) else None


def sweep(directory: Path = DIRECTORY) -> int:
    """Deletes sockets in `directory` that killed processes of this user left. Returns how many it deleted."""
    num_removed = 0
    if sys.platform != "linux":
        return num_removed
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            if not path.is_socket() or path.stat().st_uid != os.geteuid():
                continue
            connection.setblocking(False)
            try:
                with _reachable(directory, path.name) as address:
                    connection.connect(address)
            except ConnectionRefusedError:
                path.unlink()
                num_removed += 1
    return num_removed
