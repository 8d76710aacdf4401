"""Tests of a KV pool in shared memory: who may map it, its layout, and how a reader notices that slots were reused."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.kv import shared_pool as shared_pool_module
from common.kv.kv_shard import OneDevice
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import KvPool
from common.kv.shared_kv import PoolTicket, runs_of, slots_of
from common.kv.shared_pool import MappedPool, PoolLayout, PoolUnusable, SharedPool, sweep
from tests.support.open_files import open_files

TARGET = LayerGroupSpec("target", num_layers=3, num_planes=2, num_heads=2, head_dim=4, dtype="bfloat16")
DRAFT = LayerGroupSpec("draft", num_layers=1, num_planes=2, num_heads=1, head_dim=3, dtype="float32")
GROUPS = (TARGET, DRAFT)
NUM_SLOTS = 20
BOUND_S = 30.0


@pytest.fixture(autouse=True)
def pools_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pool_module, "ANSWER_TIMEOUT_S", BOUND_S)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short temporary path, because a socket's path may have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def shared_pool(tmp_path: Path) -> Iterator[SharedPool]:
    shared_pool = SharedPool(groups=GROUPS, num_slots=NUM_SLOTS, directory=tmp_path)
    yield shared_pool
    shared_pool.close()


def kv_pool(memory: SharedPool | None) -> KvPool:
    return KvPool(
        groups=GROUPS,
        max_rows=4,
        max_kv_tokens=NUM_SLOTS,
        max_tokens_per_row=NUM_SLOTS,
        tensors=OneDevice(torch.device("cpu")),
        memory=memory,
    )


def mapped_from(directory: Path, name: str) -> MappedPool:
    return MappedPool(name, groups=GROUPS, directory=directory)


def test_what_the_pool_holds_the_reader_finds_by_its_ticket(shared_pool: SharedPool, tmp_path: Path) -> None:
    pool, own = kv_pool(shared_pool), kv_pool(None)
    lease = pool.reserve(5)
    assert lease is not None
    for name, group in pool.groups.items():
        assert pool.buffers[name].dtype == own.buffers[name].dtype
        assert torch.equal(pool.buffers[name], own.buffers[name]), "it begins like any other pool: with zeros"
        values = torch.randn(group.num_layers, 2, 5, group.num_heads, group.head_dim).to(pool.buffers[name].dtype)
        pool.buffers[name][:, :, torch.tensor(lease.slots)] = values
        layers = slice(group.num_layers - 1, group.num_layers)
        lent = shared_pool.lend(name, layers, lease.slots[1:4])
        read = mapped_from(tmp_path, shared_pool.name).read(name, layers, lent.ticket)
        assert read is not None and read.is_current
        assert read.num_bytes == lent.num_bytes == 3 * group.layer_token_bytes
        found = torch.from_numpy(read.layers[:, :, list(read.ticket.slots)]).view(values.dtype)
        assert torch.equal(found.view(1, 2, 3, group.num_heads, group.head_dim), values[layers, :, 1:4])


def test_only_this_user_s_readers_map_it_and_nobody_changes_what_they_map(
    shared_pool: SharedPool, tmp_path: Path
) -> None:
    assert stat.S_IMODE((tmp_path / shared_pool.name).stat().st_mode) == 0o600
    mapped = mapped_from(tmp_path, shared_pool.name)
    assert mapped.secret == shared_pool.secret and shared_pool.secret.hex() not in shared_pool.name
    read = mapped.read("target", slice(0, 3), shared_pool.lend("target", slice(0, 3), [1]).ticket)
    assert read is not None
    for array in (read.layers, read.stamps):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(PermissionError):
        os.ftruncate(shared_pool.file, 0)


@pytest.mark.parametrize("reused", [1, 3])
def test_slots_of_another_row_are_not_current_and_until_then_they_are(
    shared_pool: SharedPool, tmp_path: Path, reused: int
) -> None:
    pool = kv_pool(shared_pool)
    lease = pool.reserve(3)
    assert lease is not None
    lent = shared_pool.lend("target", slice(0, 3), lease.slots)
    read = mapped_from(tmp_path, shared_pool.name).read("target", slice(0, 3), lent.ticket)
    assert read is not None
    pool.release(lease)
    pool.reclaim()
    assert read.is_current, "free, and as it was"
    assert pool.reserve(reused) is not None
    assert not read.is_current


@pytest.mark.parametrize("slots", [(0,), (NUM_SLOTS + 1,), (1, 1 << 31)], ids=str)
def test_a_ticket_of_slots_that_are_none_leads_nowhere(
    shared_pool: SharedPool, tmp_path: Path, slots: tuple[int, ...]
) -> None:
    mapped = mapped_from(tmp_path, shared_pool.name)
    assert mapped.read("target", slice(0, 3), PoolTicket(slots, 1, 1)) is None
    assert mapped.read("target", slice(0, 3), PoolTicket((1, NUM_SLOTS), 1, 1)) is not None


def test_no_two_tickets_have_a_number_and_slots_of_another_row_have_a_newer_stamp(shared_pool: SharedPool) -> None:
    lent = []
    for _ in range(3):
        shared_pool.stamp("target", [1, 2])
        lent += [shared_pool.lend("target", slice(0, 1), [1]) for _ in range(2)]
    assert len({each.ticket.number for each in lent}) == 6
    assert [each.is_current for each in lent] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("reused", [False, True])
def test_a_group_with_a_window_has_slots_and_stamps_of_its_own(tmp_path: Path, reused: bool) -> None:
    groups = [*GROUPS, replace(GROUPS[0], name="target_4", window=4)]
    with closing(SharedPool(groups=groups, num_slots=NUM_SLOTS, num_window_slots=3, directory=tmp_path)) as lender:
        lender.groups["target_4"][:, :, 3] = 5
        lender.stamp("target_4", [3])
        lent = lender.lend("target_4", slice(0, 1), [3])
        lender.stamp("target_4" if reused else "target", [3])
        mapped = MappedPool(lender.name, groups=groups, directory=tmp_path)
        read = mapped.read("target_4", slice(0, 1), lent.ticket)
        assert read is not None and read.is_current is not reused
        assert set(read.layers[:, :, 3].ravel().tolist()) == {5} and read.layers.shape[2] == 4
        assert mapped.read("target_4", slice(0, 1), PoolTicket((4,), 9, 9)) is None, "4 exists in the others only"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_slots_as_ranges_are_the_same_slots_in_the_same_order(slots: list[int]) -> None:
    starts, lengths = runs_of(slots)
    assert slots_of(starts, lengths) == tuple(slots)
    assert all(
        start + length != following for start, length, following in zip(starts, lengths, starts[1:], strict=False)
    )


@pytest.mark.parametrize("name", ["", "../etc/passwd", "baton-kv-" + "0" * 32, "baton-kv-" + "z" * 32])
def test_what_is_not_there_cannot_be_mapped(tmp_path: Path, name: str) -> None:
    with pytest.raises(PoolUnusable):
        mapped_from(tmp_path, name)


def test_a_pool_of_other_groups_is_not_mapped(shared_pool: SharedPool, tmp_path: Path) -> None:
    with pytest.raises(PoolUnusable, match="bytes instead of"):
        MappedPool(shared_pool.name, groups=(TARGET,), directory=tmp_path)


@contextmanager
def lying(path: Path, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """Runs a thread that answers a reader at the socket `path` as `answer` says, which need not be what a pool would
    answer.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(BOUND_S)


@pytest.mark.parametrize(
    ("seals", "match"), [(0, "may be made smaller"), (fcntl.F_SEAL_GROW, "may be made smaller"), (None, "Invalid")]
)
def test_memory_that_may_vanish_under_its_reader_is_not_mapped(
    shared_pool: SharedPool, tmp_path: Path, seals: int | None, match: str
) -> None:
    """One case is a file on disk, which cannot be sealed against shrinking."""
    name = "baton-kv-" + "1" * 32
    if seals is None:
        file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        file = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.pwrite(file, os.pread(shared_pool.file, 1 << 20, 0), 0)
    if seals is not None:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    gives = lying(tmp_path / name, lambda peer: socket.send_fds(peer, [b"\0"], [file]))
    with gives, pytest.raises(PoolUnusable, match=match):
        mapped_from(tmp_path, name)
    os.close(file)


@pytest.mark.parametrize("answer", [lambda peer: None, lambda peer: peer.send(b"\0")], ids=["nothing", "no memory"])
def test_an_answer_without_memory_is_a_refusal(tmp_path: Path, answer: Callable[[socket.socket], object]) -> None:
    name = "baton-kv-" + "1" * 32
    with lying(tmp_path / name, answer), pytest.raises(PoolUnusable, match="it was refused"):
        mapped_from(tmp_path, name)


def test_who_never_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pool_module, "ANSWER_TIMEOUT_S", 0.01)
    name, is_over = "baton-kv-" + "1" * 32, threading.Event()
    with lying(tmp_path / name, lambda peer: is_over.wait(BOUND_S)):
        with pytest.raises(PoolUnusable, match="timed out"):
            mapped_from(tmp_path, name)
        is_over.set()


@contextmanager
def few_descriptors() -> Iterator[Callable[[], None]]:
    """Yields a function that takes all descriptors that this process may have, until the block ends."""
    taken, (soft, hard) = list[int](), resource.getrlimit(resource.RLIMIT_NOFILE)

    def take_all() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    try:
        yield take_all
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_lack_of_descriptors_may_pass(tmp_path: Path, shared_pool: SharedPool) -> None:
    with few_descriptors() as take_all:
        take_all()
        with pytest.raises(PoolUnusable, match="Too many open files") as raised:
            mapped_from(tmp_path, shared_pool.name)
    assert raised.value.may_pass


def test_a_lack_of_descriptors_for_the_answer_may_pass(
    tmp_path: Path, shared_pool: SharedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, is_sent = "baton-kv-" + "1" * 32, threading.Event()

    def answer(peer: socket.socket) -> None:
        socket.send_fds(peer, [b"\0"], [shared_pool.file])
        is_sent.set()

    def user_of(_peer: socket.socket) -> int:
        assert is_sent.wait(BOUND_S)
        take_all()
        return os.geteuid()

    monkeypatch.setattr(shared_pool_module, "user_of", user_of)
    with (
        few_descriptors() as take_all,
        lying(tmp_path / name, answer),
        pytest.raises(PoolUnusable, match="Too many open files") as raised,
    ):
        mapped_from(tmp_path, name)
    assert raised.value.may_pass


def test_what_is_no_socket_is_neither_waited_for_nor_removed(tmp_path: Path) -> None:
    fifo, file = (tmp_path / ("baton-kv-" + digit * 32) for digit in "01")
    os.mkfifo(fifo)
    file.touch()
    for path in (fifo, file):
        with pytest.raises(PoolUnusable, match="cannot be mapped"):
            mapped_from(tmp_path, path.name)
    assert sweep(tmp_path) == 0
    assert fifo.is_fifo() and file.is_file()


def test_a_pool_of_another_user_is_neither_mapped_nor_given_nor_swept(
    shared_pool: SharedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind = leave_behind(tmp_path)
    other_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other_user)
    with pytest.raises(PoolUnusable, match="not of this user"):
        mapped_from(tmp_path, shared_pool.name)
    monkeypatch.setattr(shared_pool_module, "user_of", lambda peer: other_user if is_the_door(peer) else -1)
    with pytest.raises(PoolUnusable, match="refused"):
        mapped_from(tmp_path, shared_pool.name)
    assert sweep(tmp_path) == 0
    assert left_behind.is_socket()


def is_the_door(connection: socket.socket) -> bool:
    """Returns whether this is the pool's end of a connection from a reader: the end that has a name."""
    return connection.getsockname() == ""


def leave_behind(directory: Path) -> Path:
    """Creates a socket file like one that a killed process leaves, and returns its path."""
    path = directory / ("baton-kv-" + "0" * 32)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
    return path


@pytest.mark.parametrize("num_missing", [0, 1])
def test_it_asks_for_room_before_it_takes_any(
    tmp_path: Path, num_missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_available = PoolLayout(GROUPS, NUM_SLOTS, 0).file_bytes - num_missing
    monkeypatch.setattr("common.host.memory.available_bytes", lambda: num_available)
    with pytest.raises(OSError, match="are available") if num_missing else nullcontext():
        SharedPool(groups=GROUPS, num_slots=NUM_SLOTS, directory=tmp_path).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_slots", "place"), [(1 << 50, "."), (NUM_SLOTS, "missing")], ids=["room", "directory"])
def test_where_there_is_none_it_is_an_error_that_leaves_nothing(num_slots: int, place: str, tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(OSError):
        SharedPool(groups=GROUPS, num_slots=num_slots, directory=tmp_path / place)
    assert open_files() <= before and not list(tmp_path.iterdir())


def test_a_directory_whose_path_is_longer_than_a_sockets_may_be_will_do(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 200)
    directory.mkdir()
    pool = SharedPool(groups=GROUPS, num_slots=NUM_SLOTS, directory=directory)
    assert mapped_from(directory, pool.name).secret == pool.secret
    pool.close()


def test_a_closed_pool_leaves_no_file_and_its_readers_their_memory(shared_pool: SharedPool, tmp_path: Path) -> None:
    shared_pool.groups["draft"][:, :, 4] = 7
    lent = shared_pool.lend("draft", slice(0, 1), [4])
    read = mapped_from(tmp_path, shared_pool.name).read("draft", slice(0, 1), lent.ticket)
    shared_pool.close()
    assert list(tmp_path.iterdir()) == []
    assert read is not None and read.is_current and set(read.layers[:, :, 4].ravel().tolist()) == {7}


def hold_a_pool(directory: Path, pipe: Connection) -> None:
    shared_pool = SharedPool(groups=GROUPS, num_slots=NUM_SLOTS, directory=directory)
    shared_pool.groups["draft"][:, :, 4] = 7
    pipe.send((shared_pool.name, shared_pool.lend("draft", slice(0, 1), [4]).ticket.generation))
    signal.pause()


def test_a_killed_process_leaves_a_name_without_memory_which_the_next_start_sweeps(
    shared_pool: SharedPool, tmp_path: Path
) -> None:
    """A process that has mapped the killed process's pool can still read it until it unmaps it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold_a_pool, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert ours.poll(BOUND_S)
    name, generation = ours.recv()
    mapped = mapped_from(tmp_path, name)
    assert sweep(tmp_path) == 0, "both live"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(BOUND_S)
    read = mapped.read("draft", slice(0, 1), PoolTicket((4,), generation, 1))
    assert read is not None and read.is_current and np.all(read.layers[:, :, 4] == 7)
    assert {(path.stat().st_size, path.stat().st_blocks) for path in tmp_path.iterdir()} == {(0, 0)}
    with pytest.raises(PoolUnusable, match="refused"):
        mapped_from(tmp_path, name)
    assert sweep(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == [shared_pool.name]


def test_a_pool_is_not_swept_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chmod, num_swept = Path.chmod, []

    def sweep_first(path: Path, mode: int) -> None:
        num_swept.append(sweep(tmp_path))
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", sweep_first)
    pool = SharedPool(groups=GROUPS, num_slots=NUM_SLOTS, directory=tmp_path)
    assert mapped_from(tmp_path, pool.name).secret == pool.secret
    pool.close()
    assert num_swept == [0]
