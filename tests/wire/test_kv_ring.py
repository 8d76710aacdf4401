"""The ring of shared memory: who may map it, what is free, and how a reader learns that a slot was used again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire.kv_ring import BLOCK_BYTES, KvRing, MappedRing, RingSlot, RingUnusable, SlotTicket, sweep

RING_BYTES = 18 * BLOCK_BYTES
BOUND_S = 30.0


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[KvRing]:
    ring = KvRing(num_bytes=RING_BYTES, directory=tmp_path)
    yield ring
    ring.close()


def taken(ring: KvRing, num_bytes: int) -> RingSlot:
    slot = ring.take(num_bytes)
    assert slot is not None
    return slot


def test_what_the_writer_puts_into_a_slot_the_reader_finds_by_its_ticket(ring: KvRing, tmp_path: Path) -> None:
    mapped = MappedRing(ring.name, directory=tmp_path)
    taken(ring, 10)
    slot = taken(ring, BLOCK_BYTES + 7)
    slot.payload[:] = 42
    read = mapped.slot(slot.ticket)
    assert read is not None and read.is_current
    assert read.payload.tobytes() == bytes([42]) * (BLOCK_BYTES + 7)


def test_only_who_has_mapped_it_knows_its_secret(ring: KvRing, tmp_path: Path) -> None:
    assert MappedRing(ring.name, directory=tmp_path).secret == ring.secret
    assert ring.secret.hex() not in ring.name


def test_the_reader_cannot_write(ring: KvRing, tmp_path: Path) -> None:
    slot = taken(ring, 10)
    read = MappedRing(ring.name, directory=tmp_path).slot(slot.ticket)
    assert read is not None
    with pytest.raises(ValueError, match="read-only"):
        read.payload[0] = 1


def test_nobody_else_may_open_the_file(ring: KvRing, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / ring.name).stat().st_mode) == 0o600


def test_a_slot_used_again_is_not_current_whatever_part_of_it(ring: KvRing, tmp_path: Path) -> None:
    slot = taken(ring, 4 * BLOCK_BYTES)
    read = MappedRing(ring.name, directory=tmp_path).slot(slot.ticket)
    assert read is not None
    ring.give_back(slot)
    assert read.is_current, "free, and as it was"
    taken(ring, 1)
    assert not read.is_current


@pytest.mark.parametrize(
    "ticket",
    [
        SlotTicket(0, 0, 1),
        SlotTicket(0, 2 * BLOCK_BYTES, 1),
        SlotTicket(0, BLOCK_BYTES, 2),
        SlotTicket(1, BLOCK_BYTES - 1, 1),
        SlotTicket(BLOCK_BYTES, BLOCK_BYTES, 1),
        SlotTicket(1 << 62, BLOCK_BYTES, 1),
        SlotTicket(0, 1 << 62, 1),
        SlotTicket(0, BLOCK_BYTES, (1 << 64) - 1),
    ],
    ids=str,
)
def test_a_ticket_of_no_slot_that_is_there_leads_nowhere(ring: KvRing, tmp_path: Path, ticket: SlotTicket) -> None:
    taken(ring, BLOCK_BYTES)
    assert MappedRing(ring.name, directory=tmp_path).slot(ticket) is None


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6 * BLOCK_BYTES)), max_size=40))
def test_slots_never_overlap_and_all_of_the_ring_is_free_again(tmp_path_factory: pytest.TempPathFactory, steps) -> None:  # type: ignore[no-untyped-def]
    ring = KvRing(num_bytes=RING_BYTES, directory=tmp_path_factory.mktemp("ring"))
    held: list[RingSlot] = []
    for is_return, num_bytes in steps:
        if is_return and held:
            ring.give_back(held.pop(num_bytes % len(held)))
        elif (slot := ring.take(num_bytes)) is not None:
            held.append(slot)
        assert ring.num_free_bytes + sum(len(slot.stamps) * BLOCK_BYTES for slot in held) == ring.num_bytes
        assert all(slot.is_current for slot in held)
    for slot in held:
        ring.give_back(slot)
    assert len(taken(ring, ring.num_bytes).stamps) * BLOCK_BYTES == ring.num_bytes
    ring.close()


def test_a_full_ring_gives_nothing(ring: KvRing) -> None:
    taken(ring, ring.num_bytes)
    assert ring.take(1) is None


def test_a_slot_that_comes_back_twice_is_noticed(ring: KvRing) -> None:
    slot = taken(ring, 10)
    ring.give_back(slot)
    with pytest.raises(AssertionError, match="came back twice"):
        ring.give_back(slot)


@pytest.mark.parametrize("name", ["", "../etc/passwd", "baton-kv-" + "0" * 32, "baton-kv-" + "z" * 32])
def test_what_is_not_there_cannot_be_mapped(tmp_path: Path, name: str) -> None:
    with pytest.raises(RingUnusable):
        MappedRing(name, directory=tmp_path)


def test_a_link_and_a_file_too_small_are_no_rings(ring: KvRing, tmp_path: Path) -> None:
    link, empty = tmp_path / ("baton-kv-" + "1" * 32), tmp_path / ("baton-kv-" + "2" * 32)
    link.symlink_to(tmp_path / ring.name)
    empty.touch()
    for path in (link, empty):
        with pytest.raises(RingUnusable):
            MappedRing(path.name, directory=tmp_path)


def test_no_room_for_it_is_an_error_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        KvRing(num_bytes=1 << 60, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_ring_leaves_no_file_and_its_readers_their_memory(ring: KvRing, tmp_path: Path) -> None:
    slot = taken(ring, 3)
    slot.payload[:] = np.frombuffer(b"abc", np.uint8)
    read = MappedRing(ring.name, directory=tmp_path).slot(slot.ticket)
    ring.close()
    assert list(tmp_path.iterdir()) == []
    assert read is not None and read.payload.tobytes() == b"abc"


def hold_a_ring(directory: Path, pipe: Connection) -> None:
    ring = KvRing(num_bytes=RING_BYTES, directory=directory)
    taken(ring, 3).payload[:] = np.frombuffer(b"abc", np.uint8)
    pipe.send(ring.name)
    signal.pause()


def test_the_ring_of_a_killed_process_is_readable_until_the_next_start_sweeps_it(ring: KvRing, tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold_a_ring, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert ours.poll(BOUND_S)
    mapped = MappedRing(ours.recv(), directory=tmp_path)
    assert sweep(tmp_path) == 0, "both live"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(BOUND_S)
    read = mapped.slot(SlotTicket(0, 3, 1))
    assert read is not None and read.payload.tobytes() == b"abc"
    assert sweep(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == [ring.name]
